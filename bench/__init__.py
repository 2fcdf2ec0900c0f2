"""Side-by-side measurements: each figure is a ratio from one run, with its spread over repeats."""
