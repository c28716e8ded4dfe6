"""Workarounds for XLA on CPU: reuse of compiled programs on other devices, compile options, and eviction
before memory mappings run out.

This package uses private parts of JAX. The rest of the project imports only the names listed here. On GPU and TPU,
`compile_or_load` compiles a program through JAX's persistent cache and does nothing else.
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
