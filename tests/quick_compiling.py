"""Fast compilation, for tests that do not depend on optimizations of XLA."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def compiling_quickly() -> Iterator[None]:
    """Disable most optimizations of LLVM in this context. Compilation takes at most two thirds of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
