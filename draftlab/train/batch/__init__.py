"""Batches: loss rows, packing, loading."""
