"""Stored sizes after padding: padding of real models, and shards of whole pages."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_config

from amoeba_jax.errors import ConfigError
from amoeba_jax.models.config import ModelConfig, RopeConfig
from amoeba_jax.models.decoder import model_specs, num_parameters
from amoeba_jax.models.dims import VOCAB_ALIGNMENT, ModelDims
from amoeba_jax.weights.layout import WeightLayout


def make_config(hidden, heads, kv_heads, head_dim, ffn, vocab, *, layers=1, tied=False) -> ModelConfig:
    return ModelConfig(
        family="llama",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=vocab,
        max_position=8192,
        norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        tied_embeddings=tied,
        qkv_bias=False,
        output_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * layers,
        dtype="bfloat16",
    )


SMOLLM2 = make_config(576, 9, 3, 64, 1536, 49152, layers=30, tied=True)  # SmolLM2-135M


def real(shared_data: Path, model: str) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((shared_data / "configs" / model / "config.json").read_text()))


def padding(dims: ModelDims) -> dict[str, float]:
    return {kind: padding.ratio for kind, padding in WeightLayout(dims).padding().items()}


@pytest.mark.first_by_default
@pytest.mark.parametrize("model", ["Llama-3.1-70B", "Llama-3.1-8B", "Qwen3-32B"])
@pytest.mark.parametrize("max_tp", [*(pytest.param(tp, marks=pytest.mark.slow) for tp in (1, 2)), 4])
def test_models_of_round_sizes_need_no_padding(shared_data, model, max_tp):
    dims = ModelDims(real(shared_data, model), max_tp, 16, "bfloat16", transform_attention=True)
    config = dims.config
    assert dims.heads.kv_padding == len(dims.heads.q_rows()) / config.num_heads == 1
    assert dims.ffn_shard * max_tp == config.ffn_size
    assert dims.output_columns * max_tp == config.num_heads * config.head_dim
    assert dims.qkv_rows * max_tp == (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    assert dims.vocab_shard * max_tp == config.vocab_size
    ratios = padding(dims)
    assert set(ratios.values()) == {1.0}
    stored = sum(spec.num_elements for spec in model_specs(dims).values())
    assert stored == num_parameters(dims), "every parameter of the model, once"


@pytest.mark.parametrize(
    ("page_size", "ffn_shard"),
    # A page has 2,048 elements per token, so 6,912 rows of 5,120 fill 17,280 tokens: 135 pages of 128.
    [(16, 6912), (32, 6912), (64, 6912), (128, 6912), (256, 7168)],
)
def test_qwen25_32b_ffn_needs_no_padding_up_to_pages_of_128_tokens(shared_data, page_size, ffn_shard):
    dims = ModelDims(real(shared_data, "Qwen2.5-32B"), 4, page_size, "bfloat16")
    assert dims.pages.page_elems == 2048 * page_size
    assert dims.ffn_shard == ffn_shard
    assert (dims.heads.kv_heads, dims.heads.group, dims.heads.kv_padding) == (8, 5, 1)
    assert dims.qkv_rows == (10 + 2 * 2) * 128
    assert dims.vocab_shard == 152064 // 4
    ratios = padding(dims)
    assert ratios.pop("mlp.gate_up") == ratios.pop("mlp.down") == ffn_shard * 4 / 27648
    assert set(ratios.values()) == {1.0}


@pytest.mark.parametrize(("max_tp", "kv_heads"), [(1, 3), (2, 4), (4, 4)])
def test_smollm2_gets_a_zero_head_where_ranks_do_not_divide_its_heads(max_tp, kv_heads):
    dims = ModelDims(SMOLLM2, max_tp, 16, "bfloat16")
    assert (dims.heads.kv_heads, dims.heads.group, dims.heads.kv_copies) == (kv_heads, 3, 1)
    assert dims.heads.kv_padding == len(dims.heads.q_rows()) / 9 == kv_heads / 3
    assert dims.kv_shard_heads == kv_heads // max_tp
    assert dims.qkv_rows == kv_heads // max_tp * 5 * 64
    assert dims.output_columns == kv_heads // max_tp * 3 * 64
    ratios = padding(dims)
    assert ratios["attention.qkv"] == ratios["attention.o"] == kv_heads / 3
    # A page is 16 * 2 * 4 * 64 = 8,192 elements, so rows of 576 make whole pages every 128: 384 do.
    assert dims.ffn_shard == 1536 // max_tp
    assert ratios["mlp.gate_up"] == ratios["mlp.down"] == 1
    assert num_parameters(dims) == 134_515_008


def test_tied_embedding_is_stored_once():
    dims = ModelDims(SMOLLM2, 4, 16, "bfloat16")
    specs = model_specs(dims)
    assert "embedding" not in specs
    assert specs["head"].model_elements == 49152 * 576
    assert sum(spec.model_elements for spec in specs.values()) == num_parameters(dims) == 134_515_008


def test_vocabulary_is_dealt_evenly_and_aligned():
    dims = ModelDims(make_config(64, 4, 4, 16, 128, 50257), 4, 16, "float32")
    assert dims.vocab_share == 12565
    assert dims.vocab_shard == 12576
    assert dims.vocab_shard % VOCAB_ALIGNMENT == 0
    alone = ModelDims(dims.config, 1, 16, "float32")
    assert alone.vocab_shard == alone.vocab_share == 50257, "nothing to align for with one rank"


def test_only_what_is_transformable_is_laid_out_in_pages():
    config = make_config(48, 6, 3, 12, 116, 211)
    for max_tp, transform_attention in ((1, False), (1, True), (4, False), (4, True)):
        dims = ModelDims(config, max_tp, 8, "float32", transform_attention)
        paged = {spec.kind for spec in model_specs(dims).values() if spec.page_elems}
        ffn, attention = {"mlp.gate_up", "mlp.down"}, {"attention.qkv", "attention.o"}
        assert paged == (set() if max_tp == 1 else ffn | attention if transform_attention else ffn)


@settings(max_examples=40)
@given(
    hidden=st.integers(1, 300),
    kv_heads=st.integers(1, 9),
    group=st.integers(1, 6),
    head_dim=st.sampled_from([2, 6, 16, 80]),
    ffn=st.integers(1, 3000),
    max_tp=st.sampled_from([2, 4]),
    page_size=st.sampled_from([1, 8, 16, 64]),
)
def test_shards_are_the_fewest_whole_pages_that_hold_the_weights(
    hidden, kv_heads, group, head_dim, ffn, max_tp, page_size
):
    config = make_config(hidden, kv_heads * group, kv_heads, head_dim, ffn, 7)
    dims = ModelDims(config, max_tp, page_size, "float32", transform_attention=True)
    page = dims.pages.page_elems
    assert page == dims.heads.kv_heads * 2 * page_size * head_dim
    assert dims.ffn_shard * max_tp >= ffn
    # (size, least size, elements of a row): both FFN matrices are whole pages exactly when `down` is.
    heads = dims.kv_shard_heads * head_dim
    for size, least in (
        (dims.ffn_shard, -(-ffn // max_tp)),
        (dims.qkv_rows, heads * (dims.heads.group + 2)),
        (dims.output_columns, heads * dims.heads.group),
    ):
        step = page // math.gcd(page, hidden)
        assert size % step == 0
        assert least <= size < least + step
    for name, spec in model_specs(dims).items():
        if spec.page_elems:
            pages, elems = spec.stored_shape
            assert elems == page
            assert pages * page == math.prod(spec.shard_shape), name


def mixed(max_tp: int, **changes) -> ModelDims:
    return ModelDims(ModelConfig.from_hf(tiny_config("qwen3-moe-mixed") | changes), max_tp, 8, "float32")


def test_models_that_would_be_mostly_padding_are_refused():
    """Released shards have equally many pages in all layers, so smaller shards are padded."""
    changes = {"num_hidden_layers": 24, "intermediate_size": 1000}
    message = r"256 features in dense layers and 48 in layers .* would take 4\.5 times their size, the limit is 4"
    with pytest.raises(ConfigError, match=message):
        model_specs(mixed(4, **changes))
    assert model_specs(mixed(1, **changes))


def test_one_small_dense_layer_adds_the_size_of_one_layer():
    """DeepSeek's models and GLM-4.5 begin with dense layers that are much smaller than their layers with experts."""
    dims = mixed(4, num_hidden_layers=28, moe_intermediate_size=600)
    specs = [spec for spec in model_specs(dims).values() if spec.page_elems is not None]
    (stored,) = {spec.num_elements for spec in specs if spec.kind.endswith("down")}
    assert dims.ffn_shard * 20 < dims.experts.num_experts * dims.experts.size
    assert stored == 4 * dims.experts.num_experts * dims.experts.size * 48
