"""A run's head on the Hugging Face Hub: the folder with its model card, and the upload."""
