"""Workarounds for XLA on CPU. They use private parts of JAX.

A compiled program can be loaded on devices for which it was not compiled. Programs are evicted before the process runs
out of memory mappings. Compile options make compilation or steps faster.

Other packages import only the names in `__all__`. On GPU and TPU, `compile_or_load` only compiles a program through
JAX's persistent cache.
"""

from amoeba_jax.cpu_cache.compile_options import Options, few_kernels, step_options
from amoeba_jax.cpu_cache.loading import Obtained, compile_or_load
from amoeba_jax.cpu_cache.program_store import ProgramStore
from amoeba_jax.cpu_cache.relocation import PortableProgram

__all__ = [
    "Obtained",
    "Options",
    "PortableProgram",
    "ProgramStore",
    "compile_or_load",
    "few_kernels",
    "step_options",
]
