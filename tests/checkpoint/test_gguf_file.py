import math
import os
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter
from gguf.quants import quantize
from shards import build_shards

from amoeba_jax.checkpoint import GGUFCheckpoint, open_gguf
from amoeba_jax.errors import CheckpointError
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.tokenizer import Tokenizer
from amoeba_jax.weights.loading import WeightReader
from amoeba_jax.weights.readers import checkpoint_reader
from amoeba_jax.weights.store import WeightStore
from sharding.ledger import Ledger

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB, LAYERS = 4, 2, 8, 32, 64, 300, 2

BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hf_tensors(bias: bool = False, qk_norm: bool = False, tied: bool = True) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for part, rows in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (rows, HIDDEN)
            if bias:
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        if qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (HEAD_DIM,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (HEAD_DIM,)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{prefix}mlp.up_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, FFN)
        shapes[f"{prefix}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (HIDDEN,)
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    known = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in known:
        return known[name]
    _, _, layer, part = name.split(".", 3)
    stem, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{BLOCK_NAMES[stem]}.{kind}"


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows like `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(
    path: Path, arch: str, tensors: dict[str, np.ndarray], kind=None, change=lambda writer: None, **options: Any
):
    """Write `tensors` (HF names) as llama.cpp's converter does, with a small gpt2 vocabulary."""
    writer = GGUFWriter(path, arch, **options)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500000.0)
    alphabet = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    words = [*alphabet, "he", "ll"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*words, *(f"<|{i}|>" for i in range(VOCAB - len(words)))])
    writer.add_token_types([1] * len(words) + [3] * (VOCAB - len(words)))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(VOCAB - 2)
    writer.add_eos_token_id(VOCAB - 1)
    for name, tensor in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            tensor = permute(tensor, HEADS)
        if arch == "llama" and ".k_proj." in name:
            tensor = permute(tensor, KV_HEADS)
        if kind is None or tensor.ndim == 1:
            writer.add_tensor(gguf_name(name), tensor)
        else:
            writer.add_tensor(gguf_name(name), quantize(tensor, kind), raw_dtype=kind)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arch", "features"),
    [
        ("llama", {}),
        ("llama", {"bias": True, "tied": False}),
        ("qwen2", {"bias": True, "tied": False}),
        ("qwen3", {"qk_norm": True}),
    ],
)
def test_tensors_come_back_under_their_names(arch, features, tmp_path):
    expected = hf_tensors(**features)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", arch, expected))
    assert checkpoint.names() == expected.keys()
    for name, tensor in expected.items():
        array = checkpoint.read(name)
        assert array.dtype == np.float32
        assert checkpoint.shape(name) == tensor.shape
        np.testing.assert_array_equal(array, tensor, err_msg=name)


@pytest.mark.parametrize(
    ("arch", "features", "expected"),
    [
        ("llama", {}, {"architectures": ["LlamaForCausalLM"], "attention_bias": False}),
        ("qwen2", {"bias": True, "tied": False}, {"architectures": ["Qwen2ForCausalLM"]}),
        ("qwen3", {"qk_norm": True}, {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False}),
    ],
)
def test_config_is_made_from_the_metadata(arch, features, expected, tmp_path):
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", arch, hf_tensors(**features)))
    assert checkpoint.config == {
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": features.get("tied", True),
        "torch_dtype": "bfloat16",
        "bos_token_id": VOCAB - 2,
        "eos_token_id": VOCAB - 1,
        "pad_token_id": None,
        **expected,
    }


def test_file_of_the_other_byte_order_is_refused(tmp_path):
    """Its metadata can be read, but its tensors would be read as other numbers."""
    path = write_gguf(tmp_path / "m.gguf", "llama", hf_tensors(), endianess=GGUFEndian.BIG)
    with pytest.raises(
        CheckpointError, match=r"m\.gguf is big-endian, unlike this machine: convert it with gguf-convert"
    ):
        GGUFCheckpoint(path)


def test_head_dim_may_differ_from_hidden_over_heads(tmp_path):
    def change(writer):
        writer.add_key_length(16)
        writer.add_value_length(16)

    path = write_gguf(tmp_path / "m.gguf", "qwen3", hf_tensors(qk_norm=True), change=change)
    assert GGUFCheckpoint(path).config["head_dim"] == 16


def test_rotated_scores_equal_those_of_llama_cpp(tmp_path):
    """q.k after rotation is equal in both layouts: pairs of neighbors in llama.cpp, and pairs of halves here."""
    tensors = hf_tensors()
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors)
    checkpoint = GGUFCheckpoint(path)
    x = np.random.default_rng(1).standard_normal((2, HIDDEN), dtype=np.float32)
    positions = (3, 11)
    angles = [p * 500000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM) for p in positions]

    def rotate_neighbours(row, angle):
        z = (row[0::2] + 1j * row[1::2]) * np.exp(1j * angle)
        return np.stack([z.real, z.imag], -1).reshape(-1)

    def rotate_halves(row, angle):
        z = (row[: HEAD_DIM // 2] + 1j * row[HEAD_DIM // 2 :]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag])

    stored = {
        part: permute(tensors[f"model.layers.0.self_attn.{part}_proj.weight"], heads)
        for part, heads in (("q", HEADS), ("k", KV_HEADS))
    }
    for head in range(HEADS):
        scores = []
        for rotate, q_weight, k_weight in (
            (rotate_neighbours, stored["q"], stored["k"]),
            (
                rotate_halves,
                checkpoint.read("model.layers.0.self_attn.q_proj.weight"),
                checkpoint.read("model.layers.0.self_attn.k_proj.weight"),
            ),
        ):
            q = (q_weight @ x[0]).reshape(HEADS, HEAD_DIM)[head]
            k = (k_weight @ x[1]).reshape(KV_HEADS, HEAD_DIM)[head * KV_HEADS // HEADS]
            scores.append(rotate(q, angles[0]) @ rotate(k, angles[1]))
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        (GGMLQuantizationType.F16, np.float16, 2e-3),
        (GGMLQuantizationType.BF16, ml_dtypes.bfloat16, 2e-2),
        (GGMLQuantizationType.Q8_0, np.float32, 2e-2),
        (GGMLQuantizationType.Q4_0, np.float32, 6e-1),
    ],
)
def test_stored_kinds_read_as_their_dtype(kind, dtype, tolerance, tmp_path):
    expected = hf_tensors()
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", expected, kind))
    for name, tensor in expected.items():
        array = checkpoint.read(name)
        assert array.dtype == (dtype if tensor.ndim == 2 else np.float32)
        np.testing.assert_allclose(array.astype(np.float32), tensor, atol=tolerance, err_msg=name)


def test_release_gives_memory_back(tmp_path):
    tensors = hf_tensors()
    tensors["model.embed_tokens.weight"] = np.ones((1 << 19, HIDDEN), np.float32)  # 64 MB
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", tensors))
    process = psutil.Process()
    array = checkpoint.read("model.embed_tokens.weight")
    assert array.sum() == array.size
    resident = process.memory_info().rss
    checkpoint.release()
    assert process.memory_info().rss < resident - 0.9 * array.nbytes
    assert array[-1, -1] == 1.0
    checkpoint.close()
    with pytest.raises(CheckpointError, match="was closed"):
        checkpoint.read("model.norm.weight")


@pytest.mark.parametrize("threads", [1, 4])
def test_shards_are_the_same_whatever_the_number_of_threads(threads, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", hf_tensors(), GGMLQuantizationType.Q8_0)
    checkpoint = GGUFCheckpoint(path)
    dims = ModelDims(ModelConfig.from_hf(checkpoint.config), max_tp=2, page_size=16, dtype="float32")
    store = WeightStore(dims, tuple(jax.devices()[:2]))
    reader = WeightReader(checkpoint_reader(checkpoint, dims), threads)
    store.load(reader, [Ledger(1 << 30)] * 2, lambda _: None)
    whole = GGUFCheckpoint(path)
    for name, spec in store.specs.items():
        for index, expected in enumerate(build_shards(spec, whole.read, np.dtype(np.float32))):
            for device in range(2):
                np.testing.assert_array_equal(np.asarray(store.shard(device, name, index)), expected, err_msg=name)


def test_file_cut_after_opening_is_told_in_bytes(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", hf_tensors())
    checkpoint = GGUFCheckpoint(path)
    os.truncate(path, 9000)
    with pytest.raises(CheckpointError, match=r"m\.gguf is truncated: tensor '\S+' ends at byte \d+, the file at 9000"):
        checkpoint.read("model.layers.1.mlp.down_proj.weight")


def llama3_table(factor: float, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """Compute Meta's `apply_scaling` (llama-models) for each frequency, as the divisor that llama.cpp stores."""
    table = []
    for index in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * 500000.0 ** (index / HEAD_DIM)
        if wavelength < 8192 / high:
            table.append(1.0)
        elif wavelength > 8192 / low:
            table.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (high - low)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_table_becomes_config(factor, tmp_path):
    def change(writer):
        writer.add_tensor("rope_freqs.weight", llama3_table(factor))

    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", hf_tensors(), change=change))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.names()


def test_linear_rope_scaling_becomes_config(tmp_path):
    def change(writer):
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(4.0)

    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", hf_tensors(), change=change))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.array([1, 2, 3, 4], np.float32)),
            r"table \(rope_freqs\.weight\) that is not Llama 3's",
        ),
        (
            lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32)),
            r"tensor 'blk\.0\.attn_sinks\.weight', which is not known in llama models",
        ),
        (
            lambda w: w.add_string("llama.rope.scaling.type", "longrope"),
            r"rope\.scaling\.type 'longrope': only 'linear', 'yarn'",
        ),
        (lambda w: w.add_rope_dimension_count(4), r"rotates 4 of 8 head dimensions"),
        (lambda w: w.add_sliding_window(64), r"sliding-window attention \(64 of 128 tokens\)"),
    ],
)
def test_what_cannot_be_mapped_is_named(change, message, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", hf_tensors(), change=change)
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint(path)


def test_layers_must_agree(tmp_path):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_array("llama.attention.head_count", [HEADS, KV_HEADS])
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"llama\.attention\.head_count as \[4, 2\]: one number"):
        GGUFCheckpoint(path)


def test_unsupported_architecture_lists_the_supported(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "phi3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'phi3': only llama, qwen2, qwen3"):
        GGUFCheckpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 2000, -100])
def test_truncated_file_is_refused(keep, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", hf_tensors())
    content = path.read_bytes()[:keep]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"m\.gguf \({len(content)} bytes\) is truncated or not GGUF"):
        GGUFCheckpoint(path)


def test_unknown_tensor_is_named(tmp_path):
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", hf_tensors()))
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight' in .*m\.gguf"):
        checkpoint.read("lm_head.weight")


def test_tokenizer_files_are_cached_per_file(tmp_path, monkeypatch):
    monkeypatch.setenv("AMOEBA_CACHE_DIR", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "m.gguf", "llama", hf_tensors())
    first = open_gguf(path).directory
    assert first is not None
    assert first.parent == tmp_path / "cache" / "tokenizers"
    tokenizer = Tokenizer.from_directory(first)
    assert tokenizer.eos_token_ids == {VOCAB - 1}
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert len(tokenizer.encode("hello")) == 3  # he ll o
    written = (first / "tokenizer.json").stat().st_mtime_ns
    assert open_gguf(path).directory == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == written
    write_gguf(path, "llama", hf_tensors(tied=False))
    assert open_gguf(path).directory != first
