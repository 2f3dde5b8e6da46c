"""Fitting a head to a store."""
