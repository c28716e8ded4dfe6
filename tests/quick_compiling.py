"""Programs that compile fast, where tests are not about what XLA makes of them."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def compiling_quickly() -> Iterator[None]:
    """LLVM optimizes little in here: programs take two thirds of the time to compile, or less."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
