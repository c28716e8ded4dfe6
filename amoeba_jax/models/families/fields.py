"""Description of a model family, and helpers to read `config.json`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from amoeba_jax.errors import CheckpointError

HfConfig = dict[str, Any]
"""Content of a config.json, with the defaults of `transformers` for missing fields."""

Fields = dict[str, Any]
"""Fields of `ModelConfig` by name."""

Split = Callable[[str, np.ndarray], dict[str, np.ndarray] | None]
"""Function `(name, tensor)` that returns the tensors of the model within a stored tensor, by name. They are views of
`tensor`. None: the tensor is stored under its own name."""


@dataclass(frozen=True)
class Family:
    """Family of models with the same `model_type`.

    Attributes:
        fields: function that reads the fields of `ModelConfig` that differ between families. Raises `CheckpointError`
            for a value that is not supported.
        split: function that takes a `ModelConfig` and returns a function that divides stored tensors (`Split`). None:
            no stored tensor needs division or another name.
        quantizations: values of `quant_method` that `split` can read.
    """

    fields: Callable[[HfConfig], Fields]
    split: Callable[[Any], Split] | None = None
    quantizations: tuple[str, ...] = ()


def positive(hf: HfConfig, field: str) -> int:
    """Return the config field `field`, a positive integer. Raises `CheckpointError` for any other value."""
    value = hf.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {field}={value!r} must be a positive integer")
    return value


def require(hf: HfConfig, **values: Any) -> None:
    """Raise `CheckpointError` if a config field differs from its value in `values`. Missing fields are accepted."""
    for field, value in values.items():
        if hf.get(field, value) != value:
            family = hf.get("model_type")
            raise CheckpointError(f"{field}={hf[field]!r} is not supported for {family}: it must be {value!r}")


def soft_cap(hf: HfConfig, field: str) -> float | None:
    """Return the config field `field`, a soft cap. Return None if the config has no cap.

    Raises `CheckpointError` for any value that is not a positive number.
    """
    value = hf.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {field}={value!r} must be a positive number")
    return float(value)


def same_window(hf: HfConfig) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, for families in which `sliding_window` applies to all layers."""
    window = None if hf.get("sliding_window") is None else positive(hf, "sliding_window")
    return (window,) * positive(hf, "num_hidden_layers")


def windows_by_type(hf: HfConfig) -> tuple[int | None, ...]:
    """Return the sliding window of each layer according to `layer_types`.

    If the config has no `layer_types`, all layers have the window `sliding_window`.
    """
    windows = {"sliding_attention": positive(hf, "sliding_window"), "full_attention": None}
    kinds = hf.get("layer_types") or ["sliding_attention"] * positive(hf, "num_hidden_layers")
    if unknown := sorted(set(kinds) - windows.keys()):
        raise CheckpointError(f"layer_types: {unknown[0]!r} is not supported: it must be one of {', '.join(windows)}")
    return tuple(windows[kind] for kind in kinds)


def qwen_windows(hf: HfConfig) -> tuple[int | None, ...]:
    """Return the sliding window of each layer of a Qwen model. `use_sliding_window` turns windows on."""
    if hf.get("sliding_window") is None or not hf.get("use_sliding_window"):
        return (None,) * positive(hf, "num_hidden_layers")
    return windows_by_type(hf)
