"""Wires and clocks: what drives the protocols' coroutines and carries their messages."""
