"""Weight shards, compared with matrices cut by hand, and their sums, compared with dense products in float64."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import build_shards

from amoeba_jax.models.config import ModelConfig, RopeConfig
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from sharding.errors import LayoutError
from sharding.owners import Owner
from sharding.params import ParamSpec, Source, deal_rows, expand_rows, round_up_to_pages

LAYER = "model.layers.0"


SIZES = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 6),
        "group": st.integers(1, 5),
        "head_dim": st.sampled_from([2, 4, 6, 8]),
        "hidden": st.integers(3, 40),
        "ffn": st.integers(1, 90),
        "vocab": st.integers(1, 70),
        "tied": st.booleans(),
        "qkv_bias": st.booleans(),
        "output_bias": st.booleans(),
        "qk_norm": st.booleans(),
        "max_tp": st.sampled_from([1, 2, 4]),
        "page_size": st.sampled_from([1, 2, 4, 8]),
        "transform_attention": st.booleans(),
    }
)


def make_dims(sizes: dict[str, int]) -> ModelDims:
    """Return a one-layer model with awkward sizes: odd hidden, FFN and vocabulary sizes, head counts that need padding
    or copies.

    This is not a strategy, because beartype's checks use `random`, which hypothesis controls while it generates.
    """
    config = ModelConfig(
        family="llama",
        hidden_size=sizes["hidden"],
        num_layers=1,
        num_heads=sizes["kv_heads"] * sizes["group"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        ffn_size=sizes["ffn"],
        vocab_size=sizes["vocab"],
        max_position=64,
        norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        tied_embeddings=sizes["tied"],
        qkv_bias=sizes["qkv_bias"],
        output_bias=sizes["output_bias"],
        qk_norm=sizes["qk_norm"],
        sliding_windows=(None,),
        dtype="float32",
    )
    return ModelDims(config, sizes["max_tp"], sizes["page_size"], "float32", sizes["transform_attention"])


class Weights:
    """Random float64 tensors of the parameters of a model, without zeros, and their shards."""

    def __init__(self, dims: ModelDims):
        self.specs = model_specs(dims)
        random = np.random.default_rng(0)
        sources = {source.name: source for spec in self.specs.values() for source in spec.sources}
        self.tensors = {
            name: random.uniform(0.5, 1.5, source.shape) * random.choice([-1, 1], source.shape)
            for name, source in sources.items()
        }
        self.shards = {
            n: build_shards(s, self.tensors.__getitem__, np.dtype(np.float64)) for n, s in self.specs.items()
        }

    def matrix(self, name: str, shard: int) -> np.ndarray:
        """Return a shard in the shape of computations."""
        return self.shards[name][shard].reshape(self.specs[name].shard_shape)


def head_groups(dims: ModelDims) -> list[tuple[int, list[int]]]:
    """Compute by hand (KV head, its query heads) of each stored KV head. Zero heads are (-1, no query heads)."""
    config, max_tp = dims.config, dims.max_tp
    group = config.num_heads // config.num_kv_heads
    copies = max_tp // config.num_kv_heads if max_tp % config.num_kv_heads == 0 else 1
    dealt = math.ceil(group / copies)
    out = []
    for head in range(config.num_kv_heads):
        queries = list(range(head * group, (head + 1) * group))
        out += [(head, queries[copy * dealt : (copy + 1) * dealt]) for copy in range(copies)]
    return out + [(-1, [])] * (-len(out) % max_tp)


def cut_by_hand(dims: ModelDims, tensors: dict[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Cut every sharded parameter, head by head and column by column, as documented in `ModelDims` and the layers."""
    config, max_tp, h = dims.config, dims.max_tp, dims.config.head_dim
    hidden, shard, share = config.hidden_size, dims.ffn_shard, -(-config.ffn_size // max_tp)
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    groups = head_groups(dims)
    per_shard = len(groups) // max_tp
    slots = max(len(queries) for _, queries in groups)
    out: dict[str, list[np.ndarray]] = {}
    gate, up = tensors[f"{mlp}.gate_proj.weight"], tensors[f"{mlp}.up_proj.weight"]
    down = tensors[f"{mlp}.down_proj.weight"]
    for c in range(max_tp):
        gate_up, down_shard = np.zeros((hidden, 2 * shard)), np.zeros((shard, hidden))
        for i, f in enumerate(range(c * share, min((c + 1) * share, config.ffn_size))):
            gate_up[:, i], gate_up[:, shard + i], down_shard[i] = gate[f], up[f], down[:, f]
        qkv, o = np.zeros((hidden, dims.qkv_rows)), np.zeros((dims.output_columns, hidden))
        bias = np.zeros(per_shard * (slots + 2) * h)
        mine = groups[c * per_shard : (c + 1) * per_shard]
        places: list[tuple[str, int, int]] = []  # projection, head of the model, index of the head in the shard
        for s, (head, queries) in enumerate(mine):
            places += [("q", query, s * slots + i) for i, query in enumerate(queries)]
            if head >= 0:
                places += [("k", head, per_shard * slots + s), ("v", head, per_shard * (slots + 1) + s)]
        for projection, head, place in places:
            model, stored = slice(head * h, (head + 1) * h), slice(place * h, (place + 1) * h)
            qkv[:, stored] = tensors[f"{attention}.{projection}_proj.weight"][model].T
            if config.qkv_bias:
                bias[stored] = tensors[f"{attention}.{projection}_proj.bias"][model]
            if projection == "q":
                o[stored] = tensors[f"{attention}.o_proj.weight"][:, model].T
        vocabulary = np.zeros((hidden, dims.vocab_shard))
        name = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        entries = tensors[name][c * dims.vocab_share : (c + 1) * dims.vocab_share]
        vocabulary[:, : len(entries)] = entries.T
        layer = {"mlp.gate_up": gate_up.T, "mlp.down": down_shard.T, "attention.qkv": qkv.T, "attention.o": o.T}
        layer |= {"attention.qkv_bias": bias} if config.qkv_bias else {}
        for kind, value in layer.items():
            out.setdefault(f"layers.0.{kind}", []).append(value)
        out.setdefault("head", []).append(vocabulary.T)
    return out


@settings(max_examples=40)
@given(sizes=SIZES)
def test_shards_are_those_cut_by_hand(sizes):
    dims = make_dims(sizes)
    weights = Weights(dims)
    expected = cut_by_hand(dims, weights.tensors)
    for name, spec in weights.specs.items():
        assert len(weights.shards[name]) == spec.num_shards
        assert all(shard.shape == spec.stored_shape for shard in weights.shards[name])
        if spec.num_shards == 1 and name not in expected:  # used whole by every rank
            np.testing.assert_array_equal(weights.matrix(name, 0), weights.tensors[spec.sources[0].name])
    for name, shards in expected.items():
        for index, shard in enumerate(shards):
            np.testing.assert_array_equal(weights.matrix(name, index), shard, err_msg=f"{name} {index}")


@settings(max_examples=20)
@given(sizes=SIZES)
def test_shards_are_written_whole_into_memory_that_was_used_before(sizes):
    weights = Weights(make_dims(sizes))
    for name, spec in weights.specs.items():
        shards = [np.full(spec.stored_shape, np.nan) for _ in range(spec.num_shards)]
        spec.fill_shards(weights.tensors.__getitem__, shards)
        for shard, expected in zip(shards, weights.shards[name], strict=True):
            np.testing.assert_array_equal(shard, expected, err_msg=name)


@settings(max_examples=40)
@given(sizes=SIZES, dtype=st.sampled_from([np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]))
def test_tensors_come_back_from_their_shards(sizes, dtype):
    dims = make_dims(sizes)
    specs = list(model_specs(dims).values())
    random = np.random.default_rng(1)
    restored = set()
    for spec in specs:
        tensors = {source.name: random.standard_normal(source.shape).astype(dtype) for source in spec.sources}
        shards = build_shards(spec, tensors.__getitem__, dtype)
        for source in spec.sources:
            back = spec.restore_tensor(source, shards)
            assert back.dtype == dtype
            np.testing.assert_array_equal(back, tensors[source.name], err_msg=source.name)
            restored.add(source.name)
    config = dims.config
    assert len(restored) == 11 + 3 * config.qkv_bias + config.output_bias + 2 * config.qk_norm + (
        not config.tied_embeddings
    ), "every tensor of the checkpoint can be written back"


@settings(max_examples=40)
@given(sizes=SIZES)
def test_feed_forward_over_shards_is_the_dense_one(sizes):
    dims = make_dims(sizes)
    weights = Weights(dims)
    x = np.random.default_rng(2).standard_normal((5, dims.config.hidden_size))
    gate, up, down = (weights.tensors[f"{LAYER}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))

    def gated(gate_up: np.ndarray) -> np.ndarray:
        g, u = np.split(gate_up, 2, axis=1)
        return g / (1 + np.exp(-g)) * u

    dense = gated(np.concatenate([x @ gate.T, x @ up.T], axis=1)) @ down.T
    for tp in (degree for degree in (1, 2, 4) if degree <= dims.max_tp):
        spec = weights.specs["layers.0.mlp.gate_up"]
        shards = [c for rank in range(tp) for c in spec.shard_indices(tp, rank)]
        assert sorted(shards) == list(range(dims.max_tp)), "ranks share the shards out"
        assert spec.local_shards(tp) == dims.max_tp // tp
        total = sum(
            gated(x @ weights.matrix("layers.0.mlp.gate_up", c).T) @ weights.matrix("layers.0.mlp.down", c).T
            for c in shards
        )
        np.testing.assert_allclose(total, dense, rtol=1e-9, atol=1e-9 * np.abs(dense).max())


@settings(max_examples=40)
@given(sizes=SIZES)
def test_attention_projections_over_shards_are_the_dense_ones(sizes):
    """`tanh(q * k) * v` stands for attention: it mixes a query head with its KV head and nothing else."""
    dims = make_dims(sizes)
    config, h, weights = dims.config, dims.config.head_dim, Weights(dims)
    x = np.random.default_rng(3).standard_normal((5, config.hidden_size))
    prefix = f"{LAYER}.self_attn"

    def project(name: str) -> np.ndarray:
        y = x @ weights.tensors[f"{prefix}.{name}_proj.weight"].T
        y = y + weights.tensors[f"{prefix}.{name}_proj.bias"] if config.qkv_bias else y
        return y.reshape(len(x), -1, h)

    q, k, v = project("q"), project("k"), project("v")
    group = config.num_heads // config.num_kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    dense = (np.tanh(q * k) * v).reshape(len(x), -1) @ weights.tensors[f"{prefix}.o_proj.weight"].T

    kv_heads, stored_group = dims.kv_shard_heads, dims.heads.group
    used = kv_heads * (stored_group + 2) * h
    total = np.zeros_like(dense)
    for c in range(dims.max_tp):
        y = (x @ weights.matrix("layers.0.attention.qkv", c).T)[:, :used]
        if config.qkv_bias:
            y = y + weights.matrix("layers.0.attention.qkv_bias", c)
        y = y.reshape(len(x), -1, h)
        q, k, v = np.split(y, [kv_heads * stored_group, kv_heads * (stored_group + 1)], axis=1)
        k, v = np.repeat(k, stored_group, axis=1), np.repeat(v, stored_group, axis=1)
        out = (np.tanh(q * k) * v).reshape(len(x), -1)
        total += out @ weights.matrix("layers.0.attention.o", c)[:, : out.shape[1]].T
    np.testing.assert_allclose(total, dense, rtol=1e-9, atol=1e-9 * np.abs(dense).max())


@settings(max_examples=40)
@given(sizes=SIZES)
def test_padding_is_accounted_for(sizes):
    """Stored elements without zeros and copies are the elements of the model (`Weights` has no zeros)."""
    dims = make_dims(sizes)
    weights = Weights(dims)
    copies = dims.heads.kv_copies
    for name, spec in weights.specs.items():
        stored = sum(shard.size for shard in weights.shards[name])
        nonzero = sum(np.count_nonzero(shard) for shard in weights.shards[name])
        assert spec.num_elements == stored
        sizes = {source.name: math.prod(source.shape) for source in spec.sources}
        assert spec.model_elements == sum(sizes.values())
        replicas = sum(
            size * (copies - 1) for tensor, size in sizes.items() if ".k_proj" in tensor or ".v_proj" in tensor
        )
        assert nonzero == spec.model_elements + replicas


@given(
    blocks=st.lists(st.lists(st.integers(-1, 9), min_size=3, max_size=3), min_size=1, max_size=4),
    size=st.integers(1, 5),
)
def test_expand_rows_spells_blocks_out(blocks, size):
    expected = [[-1 if b < 0 else b * size + i for b in row for i in range(size)] for row in blocks]
    np.testing.assert_array_equal(expand_rows(np.array(blocks, np.int32), size), expected)


@given(total=st.integers(1, 60), num_shards=st.sampled_from([1, 2, 4]), spare=st.integers(0, 7))
def test_deal_rows_deals_every_row_once_and_in_order(total, num_shards, spare):
    shard_rows = -(-total // num_shards) + spare
    rows = deal_rows(total, num_shards, shard_rows)
    assert rows.shape == (num_shards, shard_rows)
    np.testing.assert_array_equal(rows[rows >= 0], np.arange(total))
    for shard in rows:
        used = int((shard >= 0).sum())
        assert (shard[used:] == -1).all(), "padding comes last"
    counts = (rows >= 0).sum(axis=1)
    assert counts.max() == -(-total // num_shards), "no shard has more than its even share"


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(LayoutError, match="9 rows do not fit 4 shards of 2"):
        deal_rows(9, 4, 2)


@given(
    size=st.integers(1, 200),
    row_elems=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    page_elems=st.integers(1, 64),
)
def test_round_up_to_pages_is_the_smallest_whole_number_of_pages(size, row_elems, page_elems):
    def whole(n: int) -> bool:
        return all(n * r % page_elems == 0 for r in row_elems)

    rounded = round_up_to_pages(size, row_elems, page_elems)
    assert rounded >= size
    assert whole(rounded)
    assert not any(whole(n) for n in range(size, rounded))


def test_replicated_parameter_is_whole_on_every_rank():
    spec = ParamSpec("norm", (Source("norm.weight", (7,)),), (7,), owner=Owner.NORM)
    assert [list(spec.shard_indices(4, rank)) for rank in range(4)] == [[0]] * 4
    assert spec.local_shards(4) == 1


def test_shard_that_is_not_whole_pages_is_refused():
    spec = ParamSpec("w", (Source("w", (6, 5)),), (6, 5), page_elems=8, owner=Owner.FFN)
    with pytest.raises(AssertionError, match="not whole pages of 8"):
        build_shards(spec, lambda name: np.ones((6, 5)), np.dtype(np.float32))
