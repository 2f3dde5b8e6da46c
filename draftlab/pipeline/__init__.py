"""The stages of a run, from prompts to a measured and exported head."""
