"""Calibration of confidence: the probability that the first k drafts of a step are accepted."""
