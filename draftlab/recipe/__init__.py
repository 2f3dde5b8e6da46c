"""The recipe: one YAML file of settings, and what the target decides about the head."""
