"""What a run brought: outputs and summaries."""
