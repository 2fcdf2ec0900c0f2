"""Data: shards, data sets by name, and partitions among agents."""
