"""The ladder: recipes for the best small translator, each trained to its end; and its queue."""
