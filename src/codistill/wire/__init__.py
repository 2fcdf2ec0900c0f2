"""Messages, their safe encoding and compression, and the encoding of state in checkpoints."""
