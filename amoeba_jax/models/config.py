"""Model configs, read from Hugging Face's config.json."""

import copy
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from amoeba_jax.errors import CheckpointError
from amoeba_jax.models.families import FAMILIES, refusal
from amoeba_jax.models.families.fields import positive
from amoeba_jax.models.kinds import ExpertConfig, LayerKind
from amoeba_jax.models.rope import RopeConfig, read_rope

__all__ = ["SUPPORTED_FAMILIES", "ModelConfig", "RopeConfig"]

logger = logging.getLogger(__name__)

SUPPORTED_FAMILIES = tuple(FAMILIES)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder, from its `config.json`. Sizes are without padding.

    All model families are decoders with rotary positions and gated FFNs. The options, such as `qk_norm`, say how the
    families differ.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Inner features of a dense FFN."""
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    dtype: str
    sliding_windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens, or None for a layer with full attention."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    experts: ExpertConfig | None = None
    dense_layers: tuple[int, ...] = ()
    """Layers with a dense FFN in a model with experts."""
    local_rope: RopeConfig | None = None
    """Rotary embedding of layers with a sliding window. None: `rope`."""
    activation: str = "silu"
    """Activation of the FFN (`layers.ACTIVATIONS`)."""
    norm_offset: float | None = None
    """Number that is added to the scales of all norms. See `layers.rms_norm`, also for None."""
    post_norms: bool = False
    """Whether the results of attention and FFN are normalized before they are added to the hidden states."""
    embedding_scale: float = 1.0
    """Factor on the embeddings."""
    attention_scale: float | None = None
    """Factor on the scores of attention. None: `head_dim ** -0.5`."""
    attention_soft_cap: float | None = None
    """Scores of attention become `cap * tanh(score / cap)`. None: unchanged."""
    logit_soft_cap: float | None = None
    """The same for logits."""
    sinks: bool = False
    """Whether each query head has a score without a value, which takes part in the softmax."""

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer: its window, rotary embedding and FFN (`LayerKind`)."""
        return tuple(
            LayerKind(
                window,
                local_rope=window is not None and self.local_rope is not None,
                has_experts=self.experts is not None and layer not in self.dense_layers,
            )
            for layer, window in enumerate(self.sliding_windows)
        )

    @property
    def longest_context(self) -> int:
        """Longest context in tokens: `max_position`, or more if the rotary embedding is scaled for longer contexts.

        In models with a `local_rope` (Gemma 3), `max_position` already includes the scaling.
        """
        if self.local_rope is not None:
            return self.max_position
        rope = self.rope
        scaled = {
            "linear": self.max_position * rope.factor,
            "yarn": rope.original_max_position_embeddings * rope.factor,
        }
        return int(max(self.max_position, scaled.get(rope.rope_type, 0)))

    def for_context(self, tokens: int | None) -> "ModelConfig":
        """Return the config for requests of up to `tokens` tokens. None: `max_position` tokens.

        Only configs with LongRoPE change. LongRoPE has one set of frequencies for short contexts and one for long
        contexts. This method chooses one set for all requests, and logs the choice. The choice must not change later,
        because keys in the KV cache are rotated with this set. `transformers` chooses again at each step.
        """
        if self.rope.rope_type != "longrope":
            return self
        limit, original = tokens or self.max_position, int(self.rope.original_max_position_embeddings)
        long = limit > original
        which = "long" if long else "short"
        logger.info("LongRoPE: %s factors, for requests of up to %d tokens (original: %d)", which, limit, original)
        return replace(self, rope=replace(self.rope, long=long))

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "ModelConfig":
        """Return the config from a parsed `config.json`. Missing fields get the defaults of `transformers`.

        Raises `CheckpointError`, with the name of the field, for a value that is not supported.
        """
        name = config.get("model_type")
        if name not in FAMILIES:
            raise CheckpointError(refusal(name))
        family, hf = FAMILIES[name], _completed(name, config)
        if quantization := hf.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            if method not in family.quantizations:
                raise CheckpointError(
                    f"quantization_config: {method!r} is not supported: weights must not be quantized"
                )
        heads = positive(hf, "num_attention_heads")
        kv_heads = positive(hf, "num_key_value_heads") if hf.get("num_key_value_heads") else heads
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
            )
        head_dim = positive(hf, "head_dim") if hf.get("head_dim") else positive(hf, "hidden_size") // heads
        if head_dim % 2:
            raise CheckpointError(f"head_dim={head_dim} must be even for rotary embeddings")
        max_position, num_layers = positive(hf, "max_position_embeddings"), positive(hf, "num_hidden_layers")
        common: dict[str, Any] = {
            "family": name,
            "hidden_size": positive(hf, "hidden_size"),
            "num_layers": num_layers,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "ffn_size": positive(hf, "intermediate_size"),
            "vocab_size": positive(hf, "vocab_size"),
            "max_position": max_position,
            "norm_eps": float(hf["rms_norm_eps"]),
            "tied_embeddings": bool(hf.get("tie_word_embeddings", False)),
            "dtype": _dtype_name(hf),
            "sliding_windows": (None,) * num_layers,
        }
        own = family.fields(hf)
        if "rope" not in own:
            own["rope"] = read_rope(hf.get("rope_parameters") or {}, max_position, head_dim)
        return cls(**common | own)


def _completed(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model family. Missing fields get the defaults of `transformers`."""
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


def _dtype_name(hf: dict[str, Any]) -> str:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32")
    if name not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(f"dtype={name!r} is not supported: it must be float32, float16 or bfloat16")
    return jnp.dtype(name).name
