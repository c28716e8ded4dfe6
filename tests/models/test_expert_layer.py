"""Experts compute the same as a loop over tokens, for every distribution of the tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hopper import Hopper, use_device
from tiny_models import tiny_config

from amoeba_jax.models import experts as experts_module
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import module_plan
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.models.experts import (
    Expert,
    MixtureOfExperts,
    all_experts,
    block_tokens,
    grouped_experts,
    used_experts,
)
from amoeba_jax.models.layers import StepContext
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.step_program import StepKey, step_program
from sharding.mesh import SubMeshPool
from sharding.params import ParamSpec

HIDDEN, FEATURES = 6, 5


WAYS = (functools.partial(used_experts, model_experts=6), all_experts)


def expert_of(up: jax.Array, down: jax.Array) -> Expert:
    return lambda x, index: down[index] @ jnp.tanh(up[index] @ x)


def looped(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Sum over the experts of each token in float64. Ids past the last expert belong to other shards."""
    result = np.zeros(x.shape)
    for (row, token), one in np.ndenumerate(ids):
        if one < len(up):
            result[:, token] += weights[row, token] * (down[one] @ np.tanh(up[one] @ x[:, token]))
    return result


# Experts, experts of a token, tokens, and ids that occur (None: all).
CASES = {
    "one token": (4, 2, 1, None),
    "few tokens": (8, 3, 5, None),
    "all experts": (4, 4, 7, None),
    "blocks of one expert": (4, 1, 90, [2]),
    "one expert never used": (4, 2, 33, [0, 1, 3]),
    "last expert only": (3, 1, 17, [2]),
    "none of this shard": (3, 2, 9, [3]),
    "many tokens": (5, 2, 300, None),
}


@pytest.mark.parametrize("way", WAYS, ids=("used", "all"))
@pytest.mark.parametrize("case", CASES)
def test_experts_compute_their_tokens(case: str, way):
    count, top_k, tokens, occurring = CASES[case]
    random = np.random.default_rng(1)
    choices = np.arange(count + 1) if occurring is None else np.array(occurring)
    # An id past the last expert may occur several times, because its pairs belong to other shards.
    ids = np.stack([random.choice(choices, top_k, replace=len(choices) < top_k) for _ in range(tokens)], axis=1)
    x, weights = random.standard_normal((HIDDEN, tokens)), random.random((top_k, tokens))
    up, down = random.standard_normal((count, FEATURES, HIDDEN)), random.standard_normal((count, HIDDEN, FEATURES))
    arrays = [jnp.asarray(it, jnp.float32) for it in (x, weights, up, down)]
    result = jax.jit(lambda x, w, up, down: way(expert_of(up, down), x, jnp.asarray(ids), w, count))(*arrays)
    np.testing.assert_allclose(result, looped(x, ids, weights, up, down), atol=1e-4)


@pytest.mark.parametrize("way", WAYS, ids=("used", "all"))
def test_a_nan_stays_in_its_token(way):
    x = jnp.ones((HIDDEN, 8)).at[:, 3].set(jnp.nan)
    ids, weights = jnp.tile(jnp.arange(8)[None] % 2, (1, 1)), jnp.ones((1, 8))
    expert = expert_of(jnp.ones((2, FEATURES, HIDDEN)), jnp.ones((2, HIDDEN, FEATURES)))
    result = np.asarray(way(expert, x, ids, weights, 2))
    assert np.isnan(result[:, 3]).all()
    assert np.isfinite(np.delete(result, 3, axis=1)).all()


def test_blocks_have_about_the_mean_number_of_tokens():
    assert [block_tokens(pairs, 32, tokens) for pairs, tokens in ((4, 1), (32, 8), (256, 64), (8192, 2048))] == [
        1,
        4,
        8,
        64,
    ]


def tiny_dims(name: str, max_tp: int, **changes: Any) -> ModelDims:
    return ModelDims(ModelConfig.from_hf(tiny_config(name) | changes), max_tp, 8, "float32")


def specs_of(module: nnx.Module) -> list[ParamSpec]:
    leaves = jax.tree.leaves(nnx.state(module), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return [leaf.get_metadata()["spec"] for leaf in leaves]


def function_of(module: nnx.Module, result: int = 0) -> Callable[..., jax.Array]:
    """Return a function of weights, hidden states and, if wanted, the context of a step.

    It returns the new hidden states (`result` 0), or the experts of each token (1).
    """
    graph, state = nnx.split(module)
    treedef = jax.tree.structure(state)
    return jax.jit(lambda weights, *inputs: nnx.merge(graph, jax.tree.unflatten(treedef, weights))(*inputs)[result])


def random_weights(module: nnx.Module, *, stored: bool = False) -> list[jax.Array]:
    random, specs = np.random.default_rng(2), specs_of(module)
    shapes = [spec.stored_shape if stored else spec.shard_shape for spec in specs]
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


def hidden_states() -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).standard_normal((48, 7)), jnp.float32)


def test_blocks_of_a_shard_have_the_mean_of_all_experts(monkeypatch: pytest.MonkeyPatch):
    """64 tokens with 3 of 8 experts each have 24 pairs for each expert, even if a shard has only 2 experts."""
    widths, original = set(), experts_module._expert

    def recorded(x: jax.Array, *arguments: Any, **options: Any) -> jax.Array:
        widths.add(x.shape[1])
        return original(x, *arguments, **options)

    monkeypatch.setattr(experts_module, "_expert", recorded)
    module = MixtureOfExperts(tiny_dims("qwen3-moe", 4), 0, tp=1)
    weights = [jax.ShapeDtypeStruct(spec.shard_shape, jnp.float32) for spec in specs_of(module)]
    jax.eval_shape(function_of(module), weights, jax.ShapeDtypeStruct((48, 64), jnp.float32))
    assert widths == {32, 64}, "blocks of 24 tokens, rounded up, and all tokens on GPUs"


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_no_expert_computes_padding(name: str):
    module = MixtureOfExperts(tiny_dims(name, 2), 0, tp=1)
    compute, weights, x = function_of(module), random_weights(module), hidden_states()
    page_ids = jnp.array([5, -1, 0, -1, -1, 2, 9])
    context = StepContext((), page_ids, jnp.zeros(7, jnp.int32), ())
    found, expected = (np.asarray(compute(weights, x, *it)) for it in ((context,), ()))
    used = np.asarray(page_ids) >= 0
    np.testing.assert_allclose(found[:, used], expected[:, used], rtol=1e-5)
    assert not found[:, ~used].any()
    assert expected[:, ~used].all()


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_experts_of_each_token_are_returned(name: str):
    module = MixtureOfExperts(tiny_dims(name, 2), 0, tp=1)
    weights, x = random_weights(module), hidden_states()
    page_ids = np.array([5, -1, 0, -1, -1, 2, 9])
    context = StepContext((), jnp.asarray(page_ids), jnp.zeros(7, jnp.int32), ())
    named = {spec.kind: np.asarray(it, np.float64) for spec, it in zip(specs_of(module), weights, strict=True)}
    logits = named["experts.router"] @ np.asarray(x, np.float64)
    if "experts.router_bias" in named:
        logits += named["experts.router_bias"][:, None]
    chosen = np.argsort(-logits, axis=0)[: module.experts.top_k]
    experts_of = function_of(module, result=1)
    np.testing.assert_array_equal(experts_of(weights, x), chosen)
    padded = np.where(page_ids < 0, module.experts.count, chosen)
    np.testing.assert_array_equal(experts_of(weights, x, context), padded)


# Grouped products. JAX's kernel needs a Hopper GPU, so an equivalent product replaces it. A test below lowers the
# kernel for CUDA.


def grouped_product(rows: jax.Array, matrices: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Compute the result of `grouped_matmul`, with NaN in the rows after the last group."""
    ends = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(ends, jnp.arange(len(rows)), side="right")
    product = jnp.einsum("moi,mi->mo", matrices[jnp.minimum(group, len(matrices) - 1)], rows)
    return jnp.where((group < len(matrices))[:, None], product, jnp.nan).astype(rows.dtype)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_grouped_experts_compute_what_a_loop_computes(name: str, tp: int, monkeypatch: pytest.MonkeyPatch):
    """One shard of two, or all experts. Ids of the other shard are one past the last expert."""
    monkeypatch.setattr(experts_module, "grouped_matmul", grouped_product)
    random, dims = np.random.default_rng(4), tiny_dims(name, tp)
    module = MixtureOfExperts(dims, 0, tp=1)
    count, shards = dims.experts.num_experts, [it for it in specs_of(module) if it.kind.startswith("experts.")]
    one = {spec.kind: jnp.asarray(random.standard_normal(spec.shard_shape), jnp.float32) for spec in shards}
    kinds = ["experts.gate_up", "experts.down", "experts.gate_up_bias", "experts.down_bias"]
    parameters = [one[kind] for kind in kinds if kind in one]
    ids = jnp.asarray(random.integers(0, count + 1, (3, 21)), jnp.int32)
    x, weights = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((48, 21), (3, 21)))
    activation = dims.config.activation

    def expert(x: jax.Array, index: jax.Array) -> jax.Array:
        return experts_module._expert(x, [it[index] for it in parameters], activation=activation)

    found = grouped_experts(x, ids, weights, parameters, activation=activation)
    # `ids` may name an expert twice for a token.
    expected = sum(all_experts(expert, x, ids[i : i + 1], weights[i : i + 1], count) for i in range(3))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


WIDE = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 16}


@pytest.mark.parametrize(
    ("capability", "dtype", "changes", "grouped"),
    [
        pytest.param("9.0", "bfloat16", WIDE, True, marks=pytest.mark.slow, id="Hopper"),
        pytest.param("9.0", "float32", WIDE, False, id="f32"),
        pytest.param("9.0", "bfloat16", WIDE | {"hidden_size": 96}, False, id="96 features"),
        pytest.param("8.0", "bfloat16", WIDE, False, id="A100"),
    ],
)
def test_hopper_gpus_group_tokens_by_expert(
    capability: str,
    dtype: str,
    changes: dict[str, int],
    grouped: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    use_device(monkeypatch, Hopper())
    monkeypatch.setattr(Hopper, "compute_capability", capability)
    experts_module._log_once.cache_clear()
    dims = ModelDims(ModelConfig.from_hf(tiny_config("qwen3-moe") | changes), 2, 8, dtype)
    module = MixtureOfExperts(dims, 0, tp=1)
    weights = [jax.ShapeDtypeStruct(spec.shard_shape, jnp.dtype(dtype)) for spec in specs_of(module)]
    x = jax.ShapeDtypeStruct((changes["hidden_size"], 24), jnp.dtype(dtype))
    with caplog.at_level("INFO", logger=experts_module.__name__):
        text = function_of(module).trace(weights, x).lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu_v2" in text) == grouped
    assert len(caplog.messages) == (not grouped)


# Models with dense and expert layers. Layer 0 is dense, layer 1 has experts.


def test_padded_experts_compute_what_experts_without_padding_compute():
    module = MixtureOfExperts(tiny_dims("qwen3-moe-mixed", 2, intermediate_size=300), 1, tp=1)
    stored = random_weights(module, stored=True)
    parts = list(zip(stored, specs_of(module), strict=True))
    plain = [it.reshape(-1)[: np.prod(spec.shard_shape)].reshape(spec.shard_shape) for it, spec in parts]
    assert any(before.size > after.size for before, after in zip(stored, plain, strict=True))
    x = hidden_states()
    compute = function_of(module)
    np.testing.assert_allclose(compute(stored, x), compute(plain, x), rtol=1e-5)


SIZES = {"hidden_size": 64, "head_dim": 16, "num_experts": 32, "moe_intermediate_size": 64}


def copied_bytes(dims: ModelDims, layer: int) -> int:
    """Return the bytes of temporaries of a step of 4 tokens through the FFN of one layer at TP1."""
    plan = module_plan(dims, range(layer, layer + 1), "ffn", embeds=False)
    key = StepKey((0,), plan.kinds, BatchShape(((4, 1),), 1), (1,), 4, 4, None, "ffn", False)
    compiled = step_program(dims, plan, key).compile(SubMeshPool(tuple(jax.devices()[:1]), 1).group(0, 1))
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def test_a_step_copies_one_padded_expert_at_a_time():
    dims = tiny_dims("qwen3-moe-mixed", 2, intermediate_size=4096, **SIZES)
    assert dims.ffn_shard == 2 * dims.experts.num_experts * dims.experts.size
    assert copied_bytes(dims, 1) < 4 * 3 * 64 * dims.experts.size * dims.experts.num_experts // 4


def test_copies_of_a_padded_dense_layer_are_counted():
    dims = tiny_dims("qwen3-moe-mixed", 2, intermediate_size=1024, **SIZES)
    assert dims.ffn_shard == dims.experts.num_experts * dims.experts.size // 2
    assert 0.9 * copied_bytes(dims, 0) <= 4 * dims.ffn_copy == 4 * 3 * 64 * 1024
