"""The tensor-parallel degrees. Imports no JAX."""

DEGREES = (1, 2, 4)
