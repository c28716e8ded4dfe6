"""Supported tensor-parallel degrees, in a module without JAX."""

DEGREES = (1, 2, 4)
