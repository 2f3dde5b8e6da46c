"""The hidden-state store: write, read and combine recorded states."""
