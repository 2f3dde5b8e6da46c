"""Before a run: checks of a recipe, and estimates of time, memory and disk."""
