"""Options that programs are compiled with."""

import functools

import jax
import jax.numpy as jnp

Options = dict[str, str | bool]


@functools.cache
def few_kernels(platform: str) -> Options:
    """Options for programs of many small kernels, each of which XLA:CPU compiles and maps by itself otherwise. Finding
    out whether there are any compiles a program, once in a process.

    Measured for the sampler with 32 rows of SmolLM2 and JAX 0.10.2: 117 memory mappings in place of 272, and sampling
    in 8.3 ms in place of 11.8. With the options for steps, those at TP4 have more mappings. JAX 0.12 does not know
    them.
    """
    options: Options = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": "1"}
    if platform != "cpu":
        return {}
    try:
        jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), jnp.float32)).compile(dict(options))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return {}
    return options


def step_options(platform: str) -> Options:
    """Options for layers, which are compiled with LLVM's level 2 on CPU: no slower to compile than with level 1, and
    steps are shorter than with that and with the default, 3 (figures: docs/startup.md). The head has none: with level 1
    it took longer."""
    # Tests turn optimizations off, which that would undo: what compiles in the least time then (0.8 of it).
    if jax.config.read("jax_disable_most_optimizations"):
        return few_kernels(platform)
    return {"xla_backend_optimization_level": "2"} if platform == "cpu" else {}
