"""Rotary position embeddings: settings, read from Hugging Face's config.json, and frequencies."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from amoeba_jax.errors import CheckpointError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base `theta`, and scaling of the frequencies.

    `rope_type` selects the scaling: `default` (none), `linear`, `llama3` (Llama 3.1), `yarn` or `longrope`. The other
    fields are parameters of the scaling, named as in `config.json`. Only `long` is not from `config.json`.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Factor on sines and cosines, which makes scores larger by its square."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    long: bool = True
    """Whether `long_factor` divides the frequencies, not `short_factor`."""

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
        elif self.rope_type == "longrope":
            base = base / np.array(self.long_factor if self.long else self.short_factor)
        elif self.rope_type == "yarn":
            low, high = (self._pair(turns, head_dim) for turns in (self.beta_fast, self.beta_slow))
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            span = high - low if high != low else 0.001
            interpolated = np.clip((np.arange(head_dim // 2) - low) / span, 0, 1)
            base = base / self.factor * interpolated + base * (1 - interpolated)
        return base.astype(np.float32)

    def _pair(self, turns: float, head_dim: int) -> float:
        """Return the index of the pair of features that makes `turns` full turns within the original context.

        The index may be a fraction.
        """
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(self.theta))


_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": ("original_max_position_embeddings",),
}


def read_rope(rope: dict[str, Any], max_position: int, head_dim: int) -> RopeConfig:
    """Return the rotary settings in a `rope_parameters` dictionary, as `transformers` 5 writes it.

    `max_position` is the config's `max_position_embeddings`. YaRN uses this length if `rope` names no original context.

    Raises `CheckpointError` for a value that is not supported.
    """
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise CheckpointError(
            f"rope_parameters of their own for {', '.join(nested)} are not supported: all layers must share them"
        )
    rope_type = rope.get("rope_type")
    if (rotated := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"partial_rotary_factor={rotated!r} is not supported: it must be 1.0")
    if rope_type not in _FIELDS:
        raise CheckpointError(f"rope_type={rope_type!r} is not supported: it must be one of {', '.join(_FIELDS)}")
    values = {name: _positive_number(rope, name) for name in ("rope_theta", *_FIELDS[rope_type])}
    settings: dict[str, Any] = {"theta": values.pop("rope_theta"), "rope_type": rope_type, **values}
    if rope_type == "yarn":
        settings |= _yarn(rope, max_position)
    if rope_type == "longrope":
        settings |= _longrope(rope, max_position, head_dim)
    return RopeConfig(**settings)


def _yarn(rope: dict[str, Any], max_position: int) -> dict[str, Any]:
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        raise CheckpointError("mscale_all_dim of YaRN is not supported: only DeepSeek's models have it")
    factor = _positive_number(rope, "factor")
    settings = {
        "attention_factor": 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1,
        "original_max_position_embeddings": float(max_position),
        "truncate": bool(rope.get("truncate", True)),
    }
    named = ("beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings")
    return settings | {name: _positive_number(rope, name) for name in named if rope.get(name) is not None}


def _longrope(rope: dict[str, Any], max_position: int, head_dim: int) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name)
        if not isinstance(factors, list | tuple) or len(factors) != head_dim // 2:
            raise CheckpointError(f"config.json: {name} of LongRoPE must be a list of {head_dim // 2} numbers")
        settings[name] = tuple(_positive_number({name: factor}, name) for factor in factors)
    original = _positive_number(rope, "original_max_position_embeddings")
    if rope.get("attention_factor") is not None:
        return settings | {"attention_factor": _positive_number(rope, "attention_factor")}
    scale = _positive_number(rope, "factor") if rope.get("factor") is not None else max_position / original
    if scale > 1 and original <= 1:
        raise CheckpointError(
            f"config.json: original_max_position_embeddings={original:g} of LongRoPE must be above 1 if there is no "
            "attention_factor"
        )
    attention_factor = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
    return settings | {"attention_factor": attention_factor}


def _positive_number(rope: dict[str, Any], field: str) -> float:
    value = rope.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {field}={value!r} of the rotary embedding must be a positive number")
    return float(value)
