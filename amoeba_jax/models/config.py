"""Model configs, read from Hugging Face's config.json."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from amoeba_jax.errors import CheckpointError

# All families are pre-norm decoders with rotary positions and a gated SiLU FFN. They differ in a few switches.
_QKV_BIAS = {"llama": None, "mistral": False, "qwen2": True, "qwen3": None}  # None: `attention_bias` says
SUPPORTED_FAMILIES = tuple(_QKV_BIAS)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base `theta`, and scaling of the frequencies.

    `rope_type` selects the scaling: `default` (none), `linear` or `llama3` (Llama 3.1). The other fields are its
    parameters, named as in `config.json`.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 8192

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Return the scaled angular frequencies, f32 `[head_dim / 2]`, in radians per position."""
        base = 1.0 / self.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.rope_type == "linear":
            base = base / self.factor
        elif self.rope_type == "llama3":
            wavelength = 2 * np.pi / base
            low = self.original_max_position_embeddings / self.low_freq_factor
            high = self.original_max_position_embeddings / self.high_freq_factor
            smooth = (self.original_max_position_embeddings / wavelength - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            blended = (1 - smooth) * base / self.factor + smooth * base
            base = np.where(wavelength > low, base / self.factor, np.where(wavelength < high, base, blended))
        return base.astype(np.float32)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder, from its `config.json`. Sizes are without padding."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    dtype: str

    @property
    def longest_context(self) -> int:
        """Longest context in tokens: `max_position`, times the factor of linear scaling."""
        stretch = self.rope.factor if self.rope.rope_type == "linear" else 1.0
        return int(self.max_position * max(stretch, 1.0))

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "ModelConfig":
        """Return the config from a parsed `config.json`. Missing fields get the defaults of `transformers`.

        Raises `CheckpointError`, with the name of the field, for a value that is not supported.
        """
        family = config.get("model_type")
        if family not in SUPPORTED_FAMILIES:
            raise CheckpointError(
                f"model_type={family!r} is not supported: supported families are {', '.join(SUPPORTED_FAMILIES)}"
            )
        hf = _completed(family, config)
        for field, value in (("hidden_act", "silu"), ("mlp_bias", False)):
            if hf.get(field, value) != value:
                raise CheckpointError(f"{field}={hf[field]!r} is not supported for {family}: it must be {value!r}")
        if quantization := hf.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise CheckpointError(f"quantization_config: {method!r} is not supported: weights must not be quantized")
        heads = _positive(hf, "num_attention_heads")
        kv_heads = _positive(hf, "num_key_value_heads") if hf.get("num_key_value_heads") else heads
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
            )
        bias = _QKV_BIAS[family]
        if bias is None:
            bias = bool(hf.get("attention_bias", False))
        num_layers = _positive(hf, "num_hidden_layers")
        head_dim = _positive(hf, "head_dim") if hf.get("head_dim") else _positive(hf, "hidden_size") // heads
        if head_dim % 2:
            raise CheckpointError(f"head_dim={head_dim} must be even for rotary embeddings")
        return cls(
            family=family,
            hidden_size=_positive(hf, "hidden_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_size=_positive(hf, "intermediate_size"),
            vocab_size=_positive(hf, "vocab_size"),
            max_position=_positive(hf, "max_position_embeddings"),
            norm_eps=float(hf["rms_norm_eps"]),
            rope=_rope(hf),
            tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=bias,
            output_bias=family in ("llama", "qwen3") and bias,
            qk_norm=family == "qwen3",
            sliding_windows=_sliding_windows(family, hf, num_layers),
            dtype=_dtype_name(hf),
        )


def _completed(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config, with the defaults of `transformers` for missing fields of this family."""
    from transformers import AutoConfig  # slow to import

    # A copy, because `transformers` fills in fields of nested dicts in place.
    known = {
        key: copy.deepcopy(value) for key, value in config.items() if key not in ("model_type", "transformers_version")
    }
    try:
        completed = AutoConfig.for_model(family, **known)
        # The models do this too. It applies an `original_max_position_embeddings` beside `rope_parameters`.
        completed.standardize_rope_params()
        return completed.to_dict()
    except Exception as error:  # transformers raises many types for bad values
        raise CheckpointError(f"config.json cannot be read as {family}: {error}") from error


def _positive(hf: dict[str, Any], field: str) -> int:
    value = hf.get(field)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {field}={value!r} must be a positive integer")
    return value


def _rope(hf: dict[str, Any]) -> RopeConfig:
    """Return the rotary settings of a config from `_completed`, which has them in `rope_parameters`."""
    rope = hf.get("rope_parameters") or {}
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise CheckpointError(
            f"rope_parameters of their own for {', '.join(nested)} are not supported: all layers must share them"
        )
    rope_type = rope.get("rope_type")
    if (rotated := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"partial_rotary_factor={rotated!r} is not supported: it must be 1.0")
    fields = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if rope_type not in fields:
        raise CheckpointError(f"rope_type={rope_type!r} is not supported: it must be default, linear or llama3")
    values = [_positive_number(rope, field) for field in ("rope_theta", *fields[rope_type])]
    return RopeConfig(values[0], rope_type, *values[1:])


def _positive_number(rope: dict[str, Any], field: str) -> float:
    value = rope.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {field}={value!r} of the rotary embedding must be a positive number")
    return float(value)


def _sliding_windows(family: str, hf: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in tokens, or None for a layer with full attention."""
    if hf.get("sliding_window") is None or family == "llama":
        return (None,) * num_layers
    if family == "mistral":  # ignores `layer_types`, as in `transformers`
        return (_positive(hf, "sliding_window"),) * num_layers
    if not hf.get("use_sliding_window"):
        return (None,) * num_layers
    windows = {"sliding_attention": _positive(hf, "sliding_window"), "full_attention": None}
    kinds = hf.get("layer_types") or ["sliding_attention"] * num_layers
    if unknown := sorted(set(kinds) - windows.keys()):
        raise CheckpointError(f"layer_types: {unknown[0]!r} is not supported: it must be one of {', '.join(windows)}")
    return tuple(windows[kind] for kind in kinds)


def _dtype_name(hf: dict[str, Any]) -> str:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32")
    if name not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(f"dtype={name!r} is not supported: it must be float32, float16 or bfloat16")
    return jnp.dtype(name).name
