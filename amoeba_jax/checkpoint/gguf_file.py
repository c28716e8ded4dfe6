"""GGUF files of the Llama, Qwen, Gemma and gpt-oss families, read as Hugging Face checkpoints."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from amoeba_jax.checkpoint.base import MappedFile
from amoeba_jax.checkpoint.cache import cache_root, cached_directory
from amoeba_jax.checkpoint.gguf_tokenizer import write_tokenizer
from amoeba_jax.errors import CheckpointError
from amoeba_jax.shorten import shorten

CONVERTER_VERSION = "2"
"""Version of the files that are made from a GGUF file. If it changes, caches build the files again."""

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
}
"""`model_type` and class of each architecture."""

MIXTRAL = ("mixtral", "MixtralForCausalLM")
"""`model_type` and class of the architecture `llama` with experts."""

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Experts are one tensor `[E, out, in]`.
_EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Names that an architecture has in addition, or in another meaning.
OWN_NAMES = {
    "llama": _EXPERT_NAMES,
    "qwen2moe": _EXPERT_NAMES
    | {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    "qwen3moe": _EXPERT_NAMES,
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
    "gpt-oss": _EXPERT_NAMES | {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
}
ROPE_FREQS = "rope_freqs.weight"

PLAIN_DTYPES = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


_BLOCK_ELEMENTS = 1 << 18
"""Number of elements to dequantize at once. It is small because `dequantize` makes two more copies of its result."""


class _Reader(GGUFReader):
    """Reader of GGUF metadata from a NumPy array in memory.

    Reading from a memory map would take three times as long.
    """

    @property
    def data(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = mapped.view(np.ndarray)


class Entry(NamedTuple):
    """Position, storage type and shape of one tensor in a GGUF file.

    `shape` counts elements. `stored_shape` counts bytes along the last axis if the tensor is quantized. `offset` is the
    offset in the file, in bytes.
    """

    stored_name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFCheckpoint:
    """Weights of a GGUF file, as a `Checkpoint`. The constructor reads the metadata of the file.

    Raises `CheckpointError` for a damaged file, and for architectures and tensors that are not supported.
    """

    def __init__(self, path: Path):
        self.directory: Path | None = None
        """Directory of the tokenizer files. None until `open_gguf` has written them."""
        self._path = path
        try:
            # The reader is not kept: it holds an array for each string, which takes much memory.
            reader = _Reader(path)
            self._metadata = {key: field.contents() for key, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise CheckpointError(
                f"{path} ({path.stat().st_size} bytes) is truncated or not GGUF ({error}): download it again"
            ) from error
        if reader.byte_order != "I":
            raise CheckpointError(
                f"{path} is {reader.endianess.name.lower()}-endian, unlike this machine: convert it with "
                "gguf-convert-endian, or use the safetensors directory"
            )
        self._architecture = str(self._metadata.get("general.architecture"))
        if self._architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path} has the architecture {self._architecture!r}: "
                f"only {', '.join(ARCHITECTURES)} can be read from GGUF"
            )
        stored = [
            Entry(
                tensor.name,
                tensor.tensor_type,
                tuple(int(size) for size in reversed(tensor.shape)),
                tensor.data.shape,
                tensor.data_offset,
                tensor.n_bytes,
            )
            for tensor in reader.tensors
        ]
        del reader
        self._file = MappedFile(path)
        self._entries: dict[str, Entry] = {}
        for entry in stored:
            if entry.stored_name != ROPE_FREQS:
                self._entries |= self._named(entry)
        rope_freqs = next((self._read(e) for e in stored if e.stored_name == ROPE_FREQS), None)
        self.config: dict[str, Any] = self._make_config(rope_freqs)

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, `[out, in]` for a matrix."""
        return self._entry(name).shape

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in its stored dtype, or in float32 if it is quantized."""
        entry = self._entry(name)
        array = self._read(entry)
        if self._architecture == "llama" and (found := re.search(r"\.([qk])_proj\.", name)):
            heads = "num_attention_heads" if found[1] == "q" else "num_key_value_heads"
            return unpermute(array, self.config[heads])
        if self._architecture.startswith("gemma") and name.endswith("norm.weight"):
            return array - 1  # llama.cpp stores the whole scale, Hugging Face its difference from 1
        return array

    def release(self, name: str | None = None) -> None:
        if name is None:
            self._file.release()
        else:
            entry = self._entry(name)
            self._file.release(entry.offset, entry.num_bytes)

    def close(self) -> None:
        self._file.close()

    def write_tokenizer(self, directory: Path) -> None:
        """Make tokenizer files from the vocabulary in the file, and write them into `directory`."""
        write_tokenizer(self._metadata, self.config["max_position_embeddings"], directory)

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(
                f"no tensor {name!r} in {self._path} ({len(self._entries)} tensors): it is incomplete"
            )
        return self._entries[name]

    def _read(self, entry: Entry) -> np.ndarray:
        if entry.kind in PLAIN_DTYPES:
            return self._file.view(entry.stored_name, PLAIN_DTYPES[entry.kind], entry.shape, entry.offset)
        stored = self._file.view(entry.stored_name, np.dtype(np.uint8), entry.stored_shape, entry.offset)
        array = np.empty(entry.shape, np.float32)
        rows, out = stored.reshape(-1, stored.shape[-1]), array.reshape(-1, array.shape[-1])
        step = max(1, _BLOCK_ELEMENTS // out.shape[1])
        try:
            for start in range(0, len(rows), step):
                out[start : start + step] = dequantize(rows[start : start + step], entry.kind)
            return array
        except NotImplementedError as error:
            raise CheckpointError(
                f"tensor {entry.stored_name!r} in {self._path} is stored as {entry.kind.name}, "
                f"which the gguf package cannot dequantize: use a file with another quantization"
            ) from error

    def _named(self, entry: Entry) -> dict[str, Entry]:
        """Split a stored tensor into tensors of the model. Return their entries by Hugging Face name.

        A stored tensor with all experts of a layer gives one entry for each expert. Any other stored tensor gives one
        entry.
        """
        name = self._hf_name(entry.stored_name)
        prefix, experts, part = name.partition(".experts.")
        if not experts or len(entry.shape) < 2:
            return {name: entry}
        count, size = entry.shape[0], entry.num_bytes // max(entry.shape[0], 1)
        one = entry._replace(shape=entry.shape[1:], stored_shape=entry.stored_shape[1:], num_bytes=size)
        return {
            f"{prefix}{experts}{index}.{part}": one._replace(offset=entry.offset + index * size)
            for index in range(count)
        }

    def _hf_name(self, stored_name: str) -> str:
        if stored_name in GLOBAL_NAMES:
            return GLOBAL_NAMES[stored_name]
        names = LAYER_NAMES | OWN_NAMES.get(self._architecture, {})
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored_name)
        if not found or found[2] not in names:
            raise CheckpointError(
                f"{self._path} has a tensor {stored_name!r}, which is not known in {self._architecture} models: "
                f"use the safetensors directory"
            )
        name = f"model.layers.{found[1]}.{names[found[2]]}"
        return name if found[2] == "attn_sinks" else f"{name}.{found[3]}"

    def _make_config(self, rope_freqs: np.ndarray | None) -> dict[str, Any]:
        heads = self._number("attention.head_count")
        hidden = self._number("embedding_length")
        head_dim = self._number("attention.key_length", hidden // heads)
        context = self._number("context_length")
        if (rotary := self._number("rope.dimension_count", head_dim)) != head_dim:
            raise CheckpointError(f"{self._path} rotates {rotary} of {head_dim} head dimensions: all are required")
        num_experts = self._number("expert_count", 0)
        is_mixtral = self._architecture == "llama" and num_experts > 0
        model_type, name = MIXTRAL if is_mixtral else ARCHITECTURES[self._architecture]
        window = self._number("attention.sliding_window", 0)
        if 0 < window < context and self._architecture not in ("gemma2", "gemma3", "gpt-oss"):
            raise CheckpointError(
                f"{self._path} uses sliding-window attention ({window} of {context} tokens), "
                f"which is not read from GGUF: use the safetensors directory"
            )
        config: dict[str, Any] = {
            "architectures": [name],
            "model_type": model_type,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length", self._experts_size()),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "max_position_embeddings": context,
            "rms_norm_eps": _shortest(self._number("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._number("rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(rope_freqs, head_dim),
            "tie_word_embeddings": "lm_head.weight" not in self._entries,
            "torch_dtype": "bfloat16",
        }
        if self._architecture != "qwen2":  # which has biases by definition, and no such key
            config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._entries
        if num_experts > 0:
            config |= {
                "num_local_experts" if model_type in ("mixtral", "gpt_oss") else "num_experts": num_experts,
                "num_experts_per_tok": self._number("expert_used_count"),
            }
        if self._architecture in ("qwen2moe", "qwen3moe"):
            config |= {
                "moe_intermediate_size": self._number("expert_feed_forward_length"),
                "norm_topk_prob": model_type == "qwen3_moe",  # so in all published models; GGUF has no key for it
            }
        if self._architecture == "qwen2moe":
            config["shared_expert_intermediate_size"] = self._number("expert_shared_feed_forward_length")
        if self._architecture == "gpt-oss":
            config["sliding_window"] = window or None
        if self._architecture.startswith("gemma"):
            # llama.cpp also tells the 27B models by their number of layers.
            is_27b = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[self._architecture]
            config |= {
                "sliding_window": window or None,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": hidden // heads if is_27b else head_dim,
            }
        if self._architecture == "gemma2":
            caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
            config |= {key: _shortest(self._number(key, default)) for key, default in caps.items()}
        if self._architecture == "gemma3":
            self._check_window_pattern()
            config["rope_local_base_freq"] = _shortest(self._number("rope.freq_base_swa", 10000.0))
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            config[f"{role}_token_id"] = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
        return config

    def _check_window_pattern(self) -> None:
        key = f"{self._architecture}.attention.sliding_window_pattern"
        pattern, layers = self._metadata.get(key, 6), self._number("block_count")
        if isinstance(pattern, list):
            every_sixth = len(pattern) == layers and all(it == (i % 6 != 5) for i, it in enumerate(pattern))
        else:
            every_sixth = pattern == 6
        if not every_sixth:
            raise CheckpointError(
                f"{self._path} gives {key} as {shorten(pattern)}: only 6 is supported, which means full attention in "
                "every sixth layer"
            )

    def _experts_size(self) -> Any:
        return self._metadata.get(f"{self._architecture}.expert_feed_forward_length")

    def _rope_scaling(self, rope_freqs: np.ndarray | None, head_dim: int) -> dict[str, Any] | None:
        kind = self._metadata.get(f"{self._architecture}.rope.scaling.type", "none")
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        if rope_freqs is not None:
            scaling = {
                "rope_type": "llama3",
                "factor": _shortest(float(rope_freqs.max())),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
            expected = llama3_factors(scaling, head_dim, self._number("rope.freq_base", 10000.0))
            if rope_freqs.shape != expected.shape or not np.allclose(rope_freqs, expected, rtol=1e-4):
                raise CheckpointError(
                    f"{self._path} scales its rotary frequencies by a table ({ROPE_FREQS}) that is not "
                    f"Llama 3's (8192 tokens, factors 1 and 4): use the safetensors directory"
                )
            return scaling
        if kind == "yarn":
            return {
                "rope_type": "yarn",
                "factor": _shortest(factor),
                "original_max_position_embeddings": self._number("rope.scaling.original_context_length"),
                "beta_fast": _shortest(self._number("rope.scaling.yarn_beta_fast", 32.0)),
                "beta_slow": _shortest(self._number("rope.scaling.yarn_beta_slow", 1.0)),
                "truncate": self._architecture != "gpt-oss",
            }
        if kind not in ("none", "linear"):
            raise CheckpointError(
                f"{self._path} has rope.scaling.type {kind!r}: only 'linear', 'yarn' and Llama 3's table are read "
                f"from GGUF; use the safetensors directory"
            )
        return None if factor in (0.0, 1.0) else {"rope_type": "linear", "factor": _shortest(factor)}

    def _number(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if isinstance(value, list) and len(set(value)) == 1:  # given layer by layer
            value = value[0]
        if not isinstance(value, int | float):
            raise CheckpointError(
                f"{self._path} gives {self._architecture}.{key} as {value!r}: one number for all layers is required"
            )
        return value


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Open a GGUF file as a checkpoint.

    Tokenizer files are built from the vocabulary in the GGUF file, and are cached. The cache key is the path, size and
    modification time of the GGUF file.
    """
    checkpoint = GGUFCheckpoint(path)
    status = path.stat()
    key = hashlib.sha256(f"{os.path.abspath(path)}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()
    target = cache_root() / "tokenizers" / f"{path.stem}-{key[:16]}"
    # A tokenizer.json of 150,000 tokens takes 11 MB.
    checkpoint.directory = cached_directory(target, CONVERTER_VERSION, checkpoint.write_tokenizer, 20_000_000)
    return checkpoint


def unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Convert the rows of a query or key projection from llama.cpp's rotary order to Hugging Face's order.

    `array` is the matrix or the bias of a projection with `num_heads` heads of size h. llama.cpp rotates rows `2i` and
    `2i + 1` of a head together. Hugging Face rotates rows `i` and `i + h/2` together. This function is the inverse of
    `LlamaModel.permute` in llama.cpp's `convert_hf_to_gguf.py`.
    """
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def llama3_factors(scaling: Mapping[str, Any], head_dim: int, theta: float) -> np.ndarray:
    """Return the divisor of each rotary frequency in Llama 3.1, f32 `[head_dim / 2]`.

    `scaling` is the `rope_scaling` of a config.json. The formula is that of Meta's `apply_scaling`.
    """
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


def _shortest(value: float) -> float:
    """Round `value` to the fewest decimal digits that keep the same float32 number.

    For example, 9.999999747378752e-06 becomes 1e-05.
    """
    return float(str(np.float32(value)))
