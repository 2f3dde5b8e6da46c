"""A run folder: its stages, their records, and the verbs that read one."""
