"""Compile options for the programs of a step on CPU."""

import functools

import jax
import jax.numpy as jnp

Options = dict[str, str | bool]


@functools.cache
def few_kernels(platform: str) -> Options:
    """Return compile options with which XLA emits fewer kernels for a program on CPU. Return {} for other platforms.

    XLA gives each kernel its own memory mappings, and the number of mappings is limited (`ProgramStore`). Example with
    JAX 0.10.2: the options reduce the mappings of a sampler (SmolLM2, 32 rows) from 272 to 117, and the time of a call
    from 11.8 ms to 8.3 ms.

    The first call in a process compiles a small program, to find out whether this version of JAX knows the options.
    If JAX does not know the options (JAX 0.12), return {}.
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
    """Return the compile options for programs of layers: LLVM's optimization level 2 on CPU, {} on other platforms.

    With level 2, decode steps of Llama-125M took 1 to 8% less time than with level 1, and 3 to 7% less time than with
    level 3 (JAX 0.10.2). Level 3 is XLA's default. Programs of the output projection use the default.
    """
    # Tests turn optimizations off, and level 2 would turn them on again. These options compile fastest (0.8x).
    if jax.config.read("jax_disable_most_optimizations"):
        return few_kernels(platform)
    return {"xla_backend_optimization_level": "2"} if platform == "cpu" else {}
