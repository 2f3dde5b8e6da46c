"""Operators with Triton kernels: `X.py` states an operator and holds its eager reference."""
