"""Big trials, run by hand: see README.md."""
