"""From a recipe to a run folder: stages, estimates, evaluation and export of heads."""
