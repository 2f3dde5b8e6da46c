"""Diagnosis of draft heads: faults of their files, and the variant that fits the target best."""
