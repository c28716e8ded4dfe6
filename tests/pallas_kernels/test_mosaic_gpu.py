"""The Hopper kernel without a GPU: every variant lowers for CUDA, and interpreted on CPU it computes attention.

The interpreter runs the kernel's warpgroups as threads over simulated shared memory and barriers. From JAX 0.12 on it
also finds accesses that no barrier orders. It is slow, so shapes are as small as the kernel allows.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Shape, check_output, make_case
from hopper import Hopper, is_kernel, use_device
from hopper_shapes import BASE, CHUNK, CONFIGS, DECODE, E4M3, E5M2, ONE_GROUP, PREFILL, SHAPES
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.extend.core import jaxprs_in_params

from pallas_kernels.paged_attention import Options, PageLayout, PageTable
from pallas_kernels.paged_attention.mosaic_gpu import mosaic_gpu_paged_attention, unsupported
from pallas_kernels.paged_attention.tuning import KernelConfig

FINDS_RACES = jax.__version_info__ >= (0, 12)
SMALL = Shape(B=2, T=1, K=1, G=2, h=64, page_size=16, width=9, extents=1, window=None, dtype="bfloat16")

# --- interpreted ----------------------------------------------------------------------------------------------

# (shape, lengths of the sequences, sizes). The interpreter of JAX 0.10 takes a minute, and 0.12 takes seconds.
CASES: dict[str, tuple[Shape, list[int], KernelConfig]] = {
    "decode, keys split over both warpgroups": (replace(SMALL, extents=2), [100, 0], replace(DECODE, splits=1)),
    "prefill, a sliding window": (replace(SMALL, B=1, T=34, G=4, window=20), [90], PREFILL),
}
CASES_WITH_RACES: dict[str, tuple[Shape, list[int], KernelConfig]] = {
    "everything at once": (
        replace(SMALL, B=2, T=20, K=2, G=4, extents=3, window=33, soft_cap=3.0, sinks=True, dtype="float16"),
        [130, 7],
        replace(PREFILL, splits=2),
    ),
    "fp8 decode": (replace(SMALL, K=2, kv_dtype=E4M3, extents=2, sinks=True), [130, 77], DECODE),
    "fp8 prefill": (replace(SMALL, B=1, T=70, h=80, kv_dtype=E5M2), [100], PREFILL),
    "one warpgroup, wide heads": (replace(SMALL, h=256, page_size=8, width=18), [130, 64], ONE_GROUP),
    "pages larger than a block": (replace(SMALL, page_size=256, width=2, h=96), [300, 100], DECODE),
    "13 extents": (replace(SMALL, B=1, page_size=8, width=14, extents=13), [100], DECODE),
    "page-friendly order": (replace(SMALL, K=2, layout=PageLayout.PAGE_FRIENDLY), [70, 140], DECODE),
    "raw order": (replace(SMALL, K=2, layout=PageLayout.RAW), [70, 140], DECODE),
}
if FINDS_RACES:
    CASES |= CASES_WITH_RACES


SLOW = () if FINDS_RACES else ("prefill, a sliding window", "decode, keys split over both warpgroups")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_interpreted_kernel_computes_attention_without_races(name):
    shape, lengths, config = CASES[name]
    case = make_case(shape, lengths, seed=len(name))
    interpret = InterpretGPUParams(detect_races=FINDS_RACES)
    out = mosaic_gpu_paged_attention(*case.arguments, shape.options(case), config=config, interpret=interpret)
    check_output(shape, case, out)


@pytest.mark.skipif(not FINDS_RACES, reason="the interpreter before JAX 0.12 takes minutes")
@settings(max_examples=4)
@given(lengths=st.lists(st.integers(0, 144), min_size=2, max_size=2), seed=st.integers(0, 2**32 - 1))
def test_interpreted_kernel_takes_any_lengths_and_positions(lengths, seed):
    """Positions of queries have gaps, sequences may be empty, and pages are in random extents."""
    shape = replace(SMALL, T=3, extents=2, window=40, sinks=True)
    case = make_case(shape, lengths, seed)
    out = mosaic_gpu_paged_attention(
        *case.arguments, shape.options(case), config=DECODE, interpret=InterpretGPUParams(detect_races=True)
    )
    check_output(shape, case, out)


# --- lowered --------------------------------------------------------------------------------------------------


def abstract_call(shape: Shape) -> tuple[Any, ...]:
    """Return shapes and dtypes of a call, for lowering."""

    def array(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))

    logical = array((shape.width, shape.K, 2, shape.page_size, shape.h), shape.kv_dtype or shape.dtype)
    extent = jax.eval_shape(shape.layout.physical, logical)
    wide = array((shape.B, shape.width), jnp.int32)
    table = PageTable(wide, wide, array((shape.B,), jnp.int32))
    sinks = array((shape.K * shape.G,), jnp.float32) if shape.sinks else None
    scales = array((2, shape.K), jnp.float32) if shape.kv_dtype else None
    queries = array((shape.B, shape.T, shape.K * shape.G, shape.h), shape.dtype)
    positions = array((shape.B, shape.T), jnp.int32)
    return queries, [extent] * shape.extents, [table] * shape.extents, positions, sinks, scales


def lower(shape: Shape, config: KernelConfig | None = None) -> str:
    """Lower a call for CUDA and return the program as text."""

    def call(queries, extents, tables, positions, sinks, scales):
        options = Options(shape.h**-0.5, shape.window, shape.soft_cap, sinks, scales, shape.layout.value)
        assert unsupported(queries, extents, options) is None
        return mosaic_gpu_paged_attention(queries, extents, tables, positions, options, config=config)

    return jax.jit(call).trace(*abstract_call(shape)).lower(lowering_platforms=("cuda",)).as_text()


# Sizes between the smallest and the largest one of their kind: they lower by the same code.
INNER_SIZES = {
    *(f"{n} elements a head" for n in (80, 96, 128)),
    *(f"fp8, {n} elements a head" for n in (64, 96, 128)),
    *(f"chunk, {n} elements a head" for n in (64, 96, 128)),
    *(f"{n} tokens a page" for n in (32, 64, 128)),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in INNER_SIZES)) for n in SHAPES])
def test_variant_lowers_for_cuda_without_a_gpu(name):
    assert is_kernel(lower(SHAPES[name]))


@pytest.mark.parametrize("config", CONFIGS)
def test_sizes_that_a_table_may_hold_lower(config):
    assert is_kernel(lower(replace(BASE, h=64), config))


def test_sizes_that_do_not_fit_in_shared_memory_are_refused():
    with pytest.raises(ValueError, match="bytes of shared memory"):
        lower(BASE, replace(DECODE, stages=20))


def kernel_equations(shape: Shape, config: KernelConfig) -> list[Any]:
    """Return the equations of the kernel's program, including its branches and loops."""

    def call(queries, extents, tables, positions, sinks, scales):
        options = Options(shape.h**-0.5, shape.window, shape.soft_cap, sinks, scales, shape.layout.value)
        return mosaic_gpu_paged_attention(queries, extents, tables, positions, options, config=config)

    def within(jaxpr: Any, inside: bool) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            if inside:
                yield equation
            launches = "paged_attention_kernel" in str(equation.params.get("name", ""))
            for inner in jaxprs_in_params(equation.params):
                yield from within(inner, inside or launches)

    return list(within(jax.make_jaxpr(call)(*abstract_call(shape)).jaxpr, False))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "shape", [BASE, replace(CHUNK, window=64), SHAPES["everything"]], ids=["decode", "chunk", "fp8"]
)
def test_no_reduction_goes_over_rows(shape, config):
    """The rows of a tile are in several warps. Mosaic reduces across warps through shared memory that all warpgroups
    use at the same time, so results on an H100 were wrong."""
    reductions = [e for e in kernel_equations(replace(shape, h=64), config) if e.primitive.name.startswith("reduce_")]
    assert len(reductions) >= 3  # maximum score, sum of weights, visible keys
    assert {(e.invars[0].aval.ndim, e.params["axes"]) for e in reductions} == {(2, (1,))}


# --- dispatch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "shape", "platform", "kernel"),
    [
        ("9.0", BASE, "cuda", True),
        ("9.0", CHUNK, "cuda", True),
        ("9.0", replace(BASE, dtype="float32"), "cuda", False),
        ("9.0", replace(BASE, page_size=4), "cuda", False),
        ("8.0", BASE, "cuda", False),
        ("10.0", BASE, "cuda", False),
        ("9.0", BASE, "cpu", False),  # a CPU mesh on a machine with a GPU
    ],
)
def test_kernel_is_chosen_on_hopper_for_what_it_supports(monkeypatch, capability, shape, platform, kernel):
    from pallas_kernels.paged_attention import api

    device = Hopper()
    monkeypatch.setattr(device, "compute_capability", capability, raising=False)
    use_device(monkeypatch, device)
    queries, extents, tables, positions, _, _ = abstract_call(shape)
    call = jax.jit(partial(api.paged_attention, scale=0.1))
    text = call.trace(queries, extents, tables, positions).lower(lowering_platforms=(platform,)).as_text()
    assert is_kernel(text) == kernel


@pytest.mark.parametrize(
    ("capability", "shape", "reason"),
    [
        ("9.0", BASE, None),
        ("9.0", replace(BASE, page_size=4), "page size 4 must be one of"),
        ("8.0", BASE, "needs Hopper (compute capability 9); A100 has 8.0"),
        (None, BASE, None),
    ],
)
def test_log_says_once_why_a_gpu_goes_without_the_kernel(monkeypatch, caplog, capability, shape, reason):
    from pallas_kernels.paged_attention import api

    device = None if capability is None else Hopper()
    monkeypatch.setattr(Hopper, "compute_capability", capability)
    monkeypatch.setattr(Hopper, "device_kind", "A100")
    monkeypatch.setattr(api, "gpu_device", lambda: device)
    api._log_once.cache_clear()
    queries, extents, tables, positions, _, _ = abstract_call(shape)
    with caplog.at_level("INFO", logger=api.__name__):
        for scale in (0.1, 0.2):
            jax.eval_shape(partial(api.paged_attention, scale=scale), queries, extents, tables, positions)
    assert len(caplog.messages) == (reason is not None)
    assert all(reason in message for message in caplog.messages)


def test_without_a_gpu_the_kernel_is_never_chosen():
    queries, extents, tables, positions, _, _ = abstract_call(BASE)
    from pallas_kernels.paged_attention import paged_attention

    call = jax.jit(partial(paged_attention, scale=0.1))
    text = call.trace(queries, extents, tables, positions).lower(lowering_platforms=("cuda",)).as_text()
    assert not is_kernel(text)
    assert np.prod(call.eval_shape(queries, extents, tables, positions).shape) == np.prod(queries.shape)
