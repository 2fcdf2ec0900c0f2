"""Every picture, and the look of all of them."""
