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

_GPT_OSS = {
    "head_dim": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 36,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 13,
    "attention_bias": True,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.4, 2.0, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
}
CLOSE_CALL = 1e-4
"""Logits of tokens or of experts that are closer than this may be chosen either way."""

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
    # The defaults of YaRN. `llama-yarn` sets all fields, gpt-oss does not round.
    "qwen3-yarn": {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "llama-yarn": {
        "model_type": "llama",
        "num_attention_heads": 8,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "attention_factor": 1.3,
            "original_max_position_embeddings": 32,
        },
    },
    # 2 experts for each rank at TP4.
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    },
    # A dense layer, and 6 experts that TP4 divides within each.
    "qwen3-moe-mixed": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 21,
        "mlp_only_layers": [0],
    },
    # All experts compute every token.
    "mixtral": {
        "model_type": "mixtral",
        "intermediate_size": 36,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "sliding_window": 13,
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 30,
    },
    # Dense layers that are much smaller than the layers with experts.
    "qwen2-moe-mixed": {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 3,
        "intermediate_size": 30,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 30,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
    "gemma": {
        "model_type": "gemma",
        "num_key_value_heads": 1,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 13,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 20,
        "sliding_window": 13,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "tie_word_embeddings": True,
    },
    # Requests of up to 128 tokens have the short factors of LongRoPE.
    "phi3": {
        "model_type": "phi3",
        "num_key_value_heads": 2,
        "original_max_position_embeddings": 128,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "rope_scaling": _LONGROPE,
    },
    # The long factors from the second token on: at position 0 all factors do the same.
    "phi3-long": {
        "model_type": "phi3",
        "num_key_value_heads": 2,
        "original_max_position_embeddings": 1,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "rope_scaling": _LONGROPE | {"attention_factor": 1.2},
    },
    "gpt-oss": {"model_type": "gpt_oss", **_GPT_OSS},
    "gpt-oss-mxfp4": {
        "model_type": "gpt_oss",
        **_GPT_OSS,
        "hidden_size": 64,
        "intermediate_size": 32,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    # See ROUTER_BIASES. One model has 2 experts for each rank at TP4. The other has 6 experts, and TP4 divides each.
    "gpt-oss-one-rank": {"model_type": "gpt_oss", **_GPT_OSS, "num_local_experts": 8},
    "gpt-oss-unused": {"model_type": "gpt_oss", **_GPT_OSS, "num_local_experts": 6},
    "smollm2": {
        "model_type": "llama",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}
ROUTER_BIASES: dict[str, list[float]] = {
    "gpt-oss-one-rank": [9.0, 9.0, -9.0, -9.0, -9.0, -9.0, -9.0, -9.0],
    "gpt-oss-unused": [0.0, 0.0, 0.0, -90.0, 0.0, 0.0],
}
"""Router biases of tiny models in all layers. All tokens go to experts 0 and 1, or no token goes to expert 3."""


def tiny_config(name: str) -> dict[str, Any]:
    """Return the `config.json` of a tiny model."""
    return {**_BASE, **TINY_CONFIGS[name]}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of a model, as in Hugging Face checkpoints."""
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    family = config["model_type"]
    qkv_bias = family in ("qwen2", "qwen2_moe") or config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        fused = (("qkv", q + 2 * kv),)
        for name, rows in fused if family == "phi3" else (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, hidden)
            if qkv_bias:
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, q)
        if config.get("attention_bias", False):
            shapes[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
        if family == "gpt_oss":
            shapes[f"{prefix}.self_attn.sinks"] = (config["num_attention_heads"],)
        if family in ("qwen3", "qwen3_moe", "gemma3_text"):
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head,)
        shapes |= {f"{prefix}.{name}": shape for name, shape in ffn_shapes(config, layer).items()}
        norms = ("pre_feedforward", "post_feedforward") if family in ("gemma2", "gemma3_text") else ()
        for name in ("input", "post_attention", *norms):
            shapes[f"{prefix}.{name}_layernorm.weight"] = (hidden,)
    return shapes


def ffn_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of an FFN, within its layer."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "phi3":
        return {"mlp.gate_up_proj.weight": (2 * ffn, hidden), "mlp.down_proj.weight": (hidden, ffn)}
    if config["model_type"] == "gpt_oss":
        count = config["num_local_experts"]
        return {
            "mlp.router.weight": (count, hidden),
            "mlp.router.bias": (count,),
            "mlp.experts.gate_up_proj": (count, hidden, 2 * ffn),
            "mlp.experts.gate_up_proj_bias": (count, 2 * ffn),
            "mlp.experts.down_proj": (count, ffn, hidden),
            "mlp.experts.down_proj_bias": (count, hidden),
        }
    if config["model_type"] == "mixtral":
        experts, names, ffns = "block_sparse_moe", ("w1", "w3", "w2"), [ffn] * config["num_local_experts"]
    elif (
        "num_experts" in config
        and layer not in config.get("mlp_only_layers", ())
        and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    ):
        experts, names = "mlp", ("gate_proj", "up_proj", "down_proj")
        ffns = [config["moe_intermediate_size"]] * config["num_experts"]
    else:
        wide, tall = (ffn, hidden), (hidden, ffn)
        return {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide, "mlp.down_proj.weight": tall}
    shapes: dict[str, tuple[int, ...]] = {f"{experts}.gate.weight": (len(ffns), hidden)}
    if "shared_expert_intermediate_size" in config:
        shared, size = "mlp.shared_expert", config["shared_expert_intermediate_size"]
        shapes |= {f"{shared}_gate.weight": (1, hidden), f"{shared}.down_proj.weight": (hidden, size)}
        shapes |= {f"{shared}.{name}_proj.weight": (size, hidden) for name in ("gate", "up")}
    for expert, size in enumerate(ffns):
        sizes = ((size, hidden), (size, hidden), (hidden, size))
        shapes |= {f"{experts}.experts.{expert}.{name}.weight": it for name, it in zip(names, sizes, strict=True)}
    return shapes


def write_model(config: dict[str, Any], directory: Path, seed: int = 0) -> Path:
    """Write `config.json` and a random `model.safetensors`. The values depend only on the seed."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = random.standard_normal(shape, np.float32)
        mean = 0 if config["model_type"].startswith("gemma") else 1
        tensors[name] = mean + 0.2 * values if name.endswith("norm.weight") else 0.15 * values
        tensors[name] = tensors[name].astype(np.float32)
    if "quantization_config" in config:
        quantize_experts(tensors, random)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def quantize_experts(tensors: dict[str, np.ndarray], random: np.random.Generator) -> None:
    """Replace the matrices of gpt-oss's experts with random blocks and scales of MXFP4."""
    for name in [it for it in tensors if it.endswith(("gate_up_proj", "down_proj"))]:
        count, inner, out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = random.integers(0, 256, (count, out, inner // 32, 16), np.uint8)
        tensors[f"{name}_scales"] = random.integers(118, 124, (count, out, inner // 32), np.uint8)


def tiny_model(name: str, directory: Path, seed: int = 0) -> Path:
    """Write a tiny model, chosen by name."""
    path = write_model(tiny_config(name), directory / name, seed)
    if name in ROUTER_BIASES:
        tensors = load_file(path / "model.safetensors")
        for router in [it for it in tensors if it.endswith(".router.bias")]:
            tensors[router] = np.array(ROUTER_BIASES[name], np.float32)
        save_file(tensors, path / "model.safetensors")
    return path


def ragged_prompts(vocab_size: int) -> list[list[int]]:
    """Return prompts whose lengths are around page and shard borders."""
    random = np.random.default_rng(7)
    return [random.integers(0, vocab_size, length).tolist() for length in (1, 5, 16, 17, 43)]


def spread_positions(length: int) -> np.ndarray:
    """Return 16 positions of a sequence, from the first to the last, at equal distances."""
    return np.linspace(0, length - 1, 16).astype(int)


def write_byte_tokenizer(directory: Path, chat_template: str | None) -> None:
    """Write a byte-level tokenizer without merges and without an end-of-sequence token."""
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
