"""What is wrong with a head: its files, and the reading of them that fits its target best."""
