"""The results of a run: rows, summaries, measures and average outputs, and their tables for the terminal."""
