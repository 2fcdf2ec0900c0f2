"""What a person sees: recipes, runs, their folders and reports."""
