"""Runs a description on any runtime: drives the coroutines, guards, evaluates, and keeps checkpoints."""
