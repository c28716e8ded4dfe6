"""Options of XLA:CPU for the programs of a step."""

import functools

import jax
import jax.numpy as jnp

Options = dict[str, str | bool]


@functools.cache
def few_kernels(platform: str) -> Options:
    """Return compile options that let XLA:CPU make fewer kernels from a program. Empty on other platforms.

    XLA compiles each kernel separately and gives it memory mappings of its own, which are limited (`ProgramStore`).

    The first call in a process compiles a small program, to find out whether this version of JAX knows the options. If
    not, the result is empty: JAX 0.12 does not know them. Measured for the sampler with 32 rows of SmolLM2 and JAX
    0.10.2: 117 memory mappings instead of 272, and 8.3 ms instead of 11.8 ms for a call.
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
    """Return the compile options for programs of layers: LLVM's optimization level 2 on CPU. Empty elsewhere.

    Decode steps of Llama-125M with level 2 take 0.92 to 0.99 times as long as with level 1, and 0.93 to 0.97 times as
    long as with level 3, the default (JAX 0.10.2). Programs of heads use the default: with level 1, heads of 32 rows
    took 1.3 times as long.
    """
    # Tests turn optimizations off, and level 2 would turn them on again. These options compile fastest (0.8x).
    if jax.config.read("jax_disable_most_optimizations"):
        return few_kernels(platform)
    return {"xla_backend_optimization_level": "2"} if platform == "cpu" else {}
