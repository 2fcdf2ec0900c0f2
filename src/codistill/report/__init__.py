"""Every page and picture about a run, a sweep, a federation and the theory."""
