"""Tensor-parallel degrees: powers of two. Imports no JAX."""

MAX_DEVICES = 64
"""Largest number of devices of one engine."""


def is_degree(value: object) -> bool:
    """Return whether a value is a tensor-parallel degree: a power of two, at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0 and value & (value - 1) == 0


def degrees_up_to(limit: int) -> tuple[int, ...]:
    """Return the powers of two from 1 to `limit`, inclusive, in ascending order."""
    return tuple(1 << power for power in range(limit.bit_length()))
