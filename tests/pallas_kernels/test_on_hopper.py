"""Compiled kernel on a Hopper GPU. The tests are skipped on other devices.

    JAX_PLATFORMS=cuda python -m pytest tests/pallas_kernels/test_on_hopper.py

These tests cover features that the interpreter does not simulate: wgmma, TMA, and barriers between parallel warps.
Unused pages and slots hold NaN. Launches are repeated, because a missing barrier changes the result between runs.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Shape, check_output, make_case
from hopper_shapes import BASE, CHUNK, CONFIGS, SHAPES

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.mosaic_gpu import mosaic_gpu_paged_attention
from pallas_kernels.paged_attention.tuning import KernelConfig

pytestmark = pytest.mark.skipif(
    not getattr(jax.devices()[0], "compute_capability", "").startswith("9."), reason="needs a Hopper GPU"
)
REPEATS = 20
LONG = replace(BASE, B=5, width=256)  # sequences of up to 4,096 tokens, in several splits


def check(shape: Shape, lengths: list[int], seed: int, config: KernelConfig | None = None) -> None:
    """The result is close to attention in float64, and repetitions agree bit by bit."""
    case = make_case(shape, lengths, seed)
    options = shape.options(case)
    call = jax.jit(partial(mosaic_gpu_paged_attention, options=options, config=config))
    out = call(*case.arguments)
    check_output(shape, case, out)
    first = np.asarray(out)
    for again in [call(*case.arguments) for _ in range(REPEATS)]:
        np.testing.assert_array_equal(np.asarray(again), first, err_msg="another result for the same arguments")


def lengths_of(shape: Shape) -> list[int]:
    """Return the lengths of a full sequence, a short one and an empty one, up to the batch size."""
    return [shape.longest - 3, 5, 0, shape.longest // 2, 1][: shape.B]


@pytest.mark.parametrize("name", SHAPES)
def test_kernel_computes_attention(name):
    check(SHAPES[name], lengths_of(SHAPES[name]), seed=len(name))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_sizes_that_a_table_may_hold(config):
    shape = replace(BASE, h=64)
    check(shape, lengths_of(shape), seed=1, config=config)


@pytest.mark.parametrize("extents", [1, 5])
def test_long_sequences_in_splits(extents):
    shape = replace(LONG, extents=extents)
    check(shape, lengths_of(shape), seed=2)


def test_launches_with_other_lengths_use_the_same_program():
    """A chunk at the end of contexts of many lengths: the visible blocks depend on data."""
    shape = replace(CHUNK, T=130, window=100)
    calls = {}
    for seed, length in enumerate((1, 63, 64, 65, 130, 200, 511, shape.longest)):
        case = make_case(shape, [length], seed)
        call = calls.setdefault("call", jax.jit(partial(mosaic_gpu_paged_attention, options=shape.options(case))))
        check_output(shape, case, call(*case.arguments))
    assert calls["call"]._cache_size() == 1


def test_tables_may_be_slices_of_another_array():
    """Arguments are slices of a packed batch, as in a step: XLA may pass them uncopied, aligned to only 4 bytes."""
    case = make_case(BASE, lengths_of(BASE), seed=4)
    leaves, structure = jax.tree.flatten((case.tables, case.positions))
    packed = jnp.concatenate([jnp.zeros(1, jnp.int32), *map(jnp.ravel, leaves)])

    @jax.jit
    def call(queries: jax.Array, extents: list[jax.Array], packed: jax.Array) -> jax.Array:
        parts, start = [], 1
        for leaf in leaves:
            parts.append(packed[start : start + leaf.size].reshape(leaf.shape))
            start += leaf.size
        tables, positions = jax.tree.unflatten(structure, parts)
        return mosaic_gpu_paged_attention(queries, extents, tables, positions, BASE.options(case))

    check_output(BASE, case, call(case.queries, case.extents, packed))


def test_auto_takes_the_kernel_here():
    case = make_case(BASE, lengths_of(BASE), seed=3)
    call = jax.jit(partial(paged_attention, scale=BASE.h**-0.5))
    assert "paged_attention_kernel" in call.lower(*case.arguments).as_text()
    check_output(BASE, case, call(*case.arguments))


@pytest.mark.parametrize("num_rows", [1, 8, 100, 2000])
@pytest.mark.parametrize("groups", [4, 32])
def test_grouped_products(num_rows: int, groups: int):
    """Some groups are empty, and some rows come after the last group."""
    random = np.random.default_rng(num_rows)
    sizes = np.floor(random.dirichlet(np.full(groups, 0.3)) * num_rows).astype(np.int32)
    rows = jnp.asarray(random.standard_normal((num_rows, 192)), jnp.bfloat16)
    matrices = jnp.asarray(random.standard_normal((groups, 320, 192)), jnp.bfloat16)
    found = np.asarray(jax.jit(grouped_matmul)(rows, matrices, jnp.asarray(sizes)), np.float64)
    group = np.repeat(np.arange(groups), sizes)
    used, wide = np.asarray(rows, np.float64)[: len(group)], np.asarray(matrices, np.float64)[group]
    np.testing.assert_allclose(found[: len(group)], np.einsum("moi,mi->mo", wide, used), rtol=1e-2, atol=0.2)
