"""Experts at every degree compute what NumPy computes in float64, for extreme distributions of the tokens."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from shards import build_shards
from tiny_models import tiny_config

from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.models.experts import MixtureOfExperts
from sharding.mesh import TP_AXIS, SubMeshPool
from sharding.params import ParamSpec

LAYER, TOKENS, CONSTANT = 1, 23, 4.0


@dataclass(frozen=True)
class Case:
    """Model, and the experts that its router favors and avoids.

    Attributes:
        name: name of the tiny model.
        changes: changes of its config.
        favored: experts that every token goes to.
        avoided: experts without tokens. Their weights are NaN.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    favored: tuple[int, ...] = ()
    avoided: tuple[int, ...] = ()


CASES = {
    "all tokens to one rank": Case("qwen3-moe", {"num_experts_per_tok": 2}, favored=(0, 1)),
    "all tokens to the last rank": Case("gpt-oss", {"num_local_experts": 8}, favored=(6, 7)),
    "one expert without tokens": Case("qwen3-moe", avoided=(5,)),
    "one of six experts without tokens": Case("gpt-oss", {"num_local_experts": 6}, avoided=(3,)),
    "six experts": Case("qwen3-moe-mixed"),
    "six experts with biases": Case("gpt-oss", {"num_local_experts": 6}),
    "all experts for every token": Case("mixtral"),
    "all of six experts for every token": Case("qwen3-moe-mixed", {"num_experts_per_tok": 6}),
    "all experts and a shared expert": Case("qwen2-moe", {"num_experts_per_tok": 4}),
    "one expert for each token": Case("qwen2-moe", {"num_experts_per_tok": 1}),
}


def variables(module: MixtureOfExperts) -> list[nnx.Variable]:
    return jax.tree.leaves(nnx.state(module), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def weights_of(case: Case, specs: list[ParamSpec]) -> dict[str, np.ndarray]:
    """Return random checkpoint tensors, with a router that adds a constant to the logits of some experts."""
    random = np.random.default_rng(5)
    sources = [source for spec in specs for source in spec.sources]
    tensors = {source.name: 0.3 * random.standard_normal(source.shape).astype(np.float32) for source in sources}
    router = tensors[f"model.layers.{LAYER}.mlp.gate.weight"]
    router[list(case.favored), 0] = 10.0
    router[list(case.avoided), 0] = -10.0
    for name, tensor in tensors.items():
        if any(f".experts.{expert}." in name for expert in case.avoided):
            tensor[...] = np.nan
    return tensors


def hidden_states() -> np.ndarray:
    """Return hidden states `[D, N]` whose first feature is the same in all tokens."""
    x = np.random.default_rng(6).standard_normal((48, TOKENS)).astype(np.float32)
    x[0] = CONSTANT
    return x


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def reference(config: ModelConfig, tensors: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, set[int]]:
    """Return the results of the experts in float64, token by token, and the experts with tokens."""
    weights = {name.removeprefix(f"model.layers.{LAYER}.mlp."): it.astype(np.float64) for name, it in tensors.items()}
    experts, result, used = config.experts, np.zeros(x.shape), set()
    assert experts is not None

    def feed(prefix: str, one: np.ndarray) -> np.ndarray:
        gate, up = (
            weights[f"{prefix}.{part}_proj.weight"] @ one + weights.get(f"{prefix}.{part}_proj.bias", 0.0)
            for part in ("gate", "up")
        )
        if config.activation == "clamped_silu":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        else:
            inner = silu(gate) * up
        return weights[f"{prefix}.down_proj.weight"] @ inner + weights.get(f"{prefix}.down_proj.bias", 0.0)

    for token, one in enumerate(x.astype(np.float64).T):
        logits = weights["gate.weight"] @ one + weights.get("gate.bias", 0.0)
        chosen = np.argsort(-logits)[: experts.top_k]
        scores = np.exp(logits - logits.max())
        shares = scores[chosen] / (scores[chosen] if experts.normalized else scores).sum()
        used |= set(chosen.tolist())
        result[:, token] = sum(share * feed(f"experts.{e}", one) for share, e in zip(shares, chosen, strict=True))
        if experts.shared_ffn_size:
            gate = 1 / (1 + np.exp(-weights["shared_expert_gate.weight"] @ one))
            result[:, token] += gate * feed("shared_expert", one)
    return result, used


def computed(module: MixtureOfExperts, tp: int, tensors: dict[str, np.ndarray], x: np.ndarray) -> list[np.ndarray]:
    """Return the results of all ranks."""
    group = SubMeshPool(tuple(jax.devices()[:4]), 4).group(0, tp)
    graph, state = nnx.split(module)
    treedef = jax.tree.structure(state)
    weights = []
    for variable in variables(module):
        spec, index = variable.get_metadata()["spec"], variable.get_metadata()["shard"]
        shards = build_shards(spec, tensors.__getitem__, np.dtype(np.float32))
        used = [shard.reshape(-1)[: math.prod(spec.shard_shape)].reshape(spec.shard_shape) for shard in shards]
        weights.append(np.stack([used[spec.shard_indices(tp, rank)[index]] for rank in range(tp)]))

    def compute(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        local = jax.tree.unflatten(treedef, [weight[0] for weight in weights])
        return nnx.merge(graph, local)(x)[0][None]

    run = jax.shard_map(compute, mesh=group.mesh, in_specs=(P(TP_AXIS), P()), out_specs=P(TP_AXIS), check_vma=False)
    return list(np.asarray(jax.jit(run)(weights, jnp.asarray(x))))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_experts_equal_numpy_at_every_degree(case: Case, tp: int):
    dims = ModelDims(ModelConfig.from_hf(tiny_config(case.name) | case.changes), 4, 8, "float32")
    module = MixtureOfExperts(dims, LAYER, tp)
    tensors, x = weights_of(case, [it.get_metadata()["spec"] for it in variables(module)]), hidden_states()
    expected, used = reference(dims.config, tensors, x)
    experts = dims.config.experts
    assert experts is not None
    if case.favored:
        assert used == set(case.favored)
        assert dims.experts.whole, "the favored experts are those of one rank"
    assert used.isdisjoint(case.avoided)
    if experts.top_k == experts.count or case.avoided:
        assert used == set(range(experts.count)) - set(case.avoided)
    ranks = computed(module, tp, tensors, x)
    assert len({rank.tobytes() for rank in ranks}) == 1
    np.testing.assert_allclose(ranks[0], expected, atol=5e-5 * np.abs(expected).max(), rtol=0)
