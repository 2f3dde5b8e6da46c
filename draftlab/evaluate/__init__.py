"""Evaluation of heads: real speculative decoding of a suite, counted and timed."""
