"""Push a run's head to the Hugging Face Hub: the model card, the folder and its upload."""
