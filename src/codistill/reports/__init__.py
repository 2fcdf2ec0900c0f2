"""HTML pages about runs."""
