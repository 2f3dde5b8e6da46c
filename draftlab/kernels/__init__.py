"""Operators with Triton kernels: `X/` states an operator and holds its eager reference."""
