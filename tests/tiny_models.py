"""Random tiny models of every supported family, written in Hugging Face form without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"

_BASE = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "intermediate_size": 116,
    "vocab_size": 211,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

# Every head count is awkward at some degree: at TP4, 3 and 6 KV heads need padding, 1 and 2 need copies.
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama"},
    "llama3-scaled-rope": {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-bias-linear-rope": {
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "attention_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "mistral-window": {"model_type": "mistral", "num_attention_heads": 8, "sliding_window": 13},
    "qwen2": {
        "model_type": "qwen2",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 32},
    "smollm2": {
        "model_type": "llama",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def tiny_config(name: str) -> dict[str, Any]:
    """Return the `config.json` of a tiny model."""
    config = {**_BASE, **TINY_CONFIGS[name]}
    return config | {"architectures": [f"{_CLASSES[config['model_type']]}ForCausalLM"]}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of a model, as in Hugging Face checkpoints."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    qkv_bias = config["model_type"] == "qwen2" or config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, hidden)
            if qkv_bias:
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, q)
        if config.get("attention_bias", False):
            shapes[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
        if config["model_type"] == "qwen3":
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head,)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = shapes[f"{prefix}.mlp.up_proj.weight"] = (ffn, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, ffn)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return shapes


def write_model(config: dict[str, Any], directory: Path, seed: int = 0) -> Path:
    """Write `config.json` and a random `model.safetensors`. The values depend only on the seed."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = random.standard_normal(shape, np.float32)
        tensors[name] = 1 + 0.2 * values if name.endswith("norm.weight") else 0.15 * values
    save_file({name: value.astype(np.float32) for name, value in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def tiny_model(name: str, directory: Path, seed: int = 0) -> Path:
    """Write a tiny model, chosen by name."""
    return write_model(tiny_config(name), directory / name, seed)


def ragged_prompts(vocab_size: int) -> list[list[int]]:
    """Return prompts whose lengths are around page and shard borders."""
    random = np.random.default_rng(7)
    return [random.integers(0, vocab_size, length).tolist() for length in (1, 5, 16, 17, 43)]


def write_byte_tokenizer(directory: Path, chat_template: str | None) -> None:
    """Return a byte-level tokenizer without merges and without an end-of-sequence token."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if chat_template:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def poison(directory: Path, token: int) -> Path:
    """Change a written model with untied embeddings so that the hidden state of a token is NaN."""
    path, name = directory / "model.safetensors", "model.embed_tokens.weight"
    tensors = load_file(path)
    assert "lm_head.weight" in tensors, "the logits of all tokens would be NaN"
    tensors[name] = tensors[name].copy()
    tensors[name][token] = np.nan
    save_file(tensors, path)
    return directory


def byte_token(character: str) -> int:
    """Return the token of an ASCII character in a `byte_model`."""
    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(character)


def byte_model(directory: Path, chat_template: str | None = CHAT_TEMPLATE, **changes: Any) -> Path:
    """Write a model of one layer that accepts text: every byte is a token."""
    size = {"vocab_size": 256, "max_position_embeddings": 4096, "num_hidden_layers": 1}
    config = tiny_config("smollm2") | size | changes
    write_model(config, directory)
    write_byte_tokenizer(directory, chat_template)
    return directory
