"""What travels: the safe encoding of messages and of the state kept in checkpoints."""
