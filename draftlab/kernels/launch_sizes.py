"""Arithmetic of grids and tiles on the host.

triton.cdiv and triton.next_power_of_2, which kernels can call too, take the host 3 µs a call,
200 times in a training step.
"""


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of 2 that is at least n, for n ≥ 1."""
    return 1 << (n - 1).bit_length()
