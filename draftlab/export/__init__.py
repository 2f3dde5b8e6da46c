"""Heads in other programs' layouts. An export renames, fills and casts; it never computes."""
