"""One run over several machines of one operator: a host process on each, joined by TCP."""
