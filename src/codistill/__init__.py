"""codistill."""
