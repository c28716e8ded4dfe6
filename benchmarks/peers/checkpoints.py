"""Models of all engines: a checkpoint in Hugging Face form, and the same weights as a GGUF file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import save_file

from amoeba_jax.checkpoint import open_checkpoint
from amoeba_jax.checkpoint.gguf_file import GLOBAL_NAMES, LAYER_NAMES
from amoeba_jax.models.config import ModelConfig


def write_random_llama(config: dict[str, Any], directory: Path, seed: int) -> None:
    """Write a Llama with random f32 weights: normal with a standard deviation of 0.02, and ones for norms."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model = ModelConfig.from_hf(config)
    hidden, ffn, head = model.hidden_size, model.ffn_size, model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    if not model.tied_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (model.num_heads * head, hidden),
            f"{prefix}.self_attn.k_proj.weight": (model.num_kv_heads * head, hidden),
            f"{prefix}.self_attn.v_proj.weight": (model.num_kv_heads * head, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, model.num_heads * head),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.up_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    chance = np.random.default_rng(seed)
    tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else chance.standard_normal(shape, np.float32) * np.float32(0.02)
        for name, shape in shapes.items()
    }
    # transformers refuses a file without a format.
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_gguf(model_dir: Path, path: Path) -> None:
    """Write the Llama in `model_dir` as an f32 GGUF file without a vocabulary."""
    checkpoint = open_checkpoint(str(model_dir))
    model = ModelConfig.from_hf(checkpoint.config)
    writer = GGUFWriter(path, "llama")
    writer.add_name(model_dir.name)
    writer.add_file_type(0)  # All f32.
    writer.add_vocab_size(model.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_context_length(model.max_position)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.ffn_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope.theta)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    names = {theirs: ours for ours, theirs in GLOBAL_NAMES.items()}
    layer_names = {theirs: ours for ours, theirs in LAYER_NAMES.items()}
    for name in sorted(checkpoint.names()):
        array = checkpoint.read(name).astype(np.float32)
        if name in names:
            stored = names[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            part, _, kind = rest.rpartition(".")
            stored = f"blk.{layer}.{layer_names[part]}.{kind}"
            if part == "self_attn.q_proj":
                array = permute(array, model.num_heads)
            elif part == "self_attn.k_proj":
                array = permute(array, model.num_kv_heads)
        writer.add_tensor(stored, array, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint.close()


def permute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows of a query or key projection in llama.cpp's order: the inverse of `gguf_file.unpermute`."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
