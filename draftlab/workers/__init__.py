"""Workers that answer prompts and record hidden states, on this machine or on a Ray cluster."""
