"""Functions that protocols share."""
