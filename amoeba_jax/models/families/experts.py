"""Parts that all model families with experts share: config fields, and names of stored tensors."""

import re
from typing import Any

import numpy as np

from amoeba_jax.errors import CheckpointError
from amoeba_jax.models.families.fields import HfConfig, positive
from amoeba_jax.models.kinds import ExpertConfig

_FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj")


def read_experts(hf: HfConfig, *, size: str, **options: Any) -> ExpertConfig:
    """Return the settings of the experts from a config.

    `size` is the name of the config field that gives the number of inner features of an expert. `options` are other
    fields of `ExpertConfig`.

    Raises `CheckpointError` if a token uses more experts than the layer has.
    """
    count = positive(hf, "num_local_experts" if hf.get("num_local_experts") is not None else "num_experts")
    top_k = positive(hf, "num_experts_per_tok")
    if top_k > count:
        raise CheckpointError(f"config.json: num_experts_per_tok={top_k} exceeds the {count} experts")
    return ExpertConfig(count, top_k, positive(hf, size), **options)


def dense_layers(hf: HfConfig) -> tuple[int, ...]:
    """Return the indices of the layers with a dense FFN in a Qwen model with experts."""
    step, dense = positive(hf, "decoder_sparse_step"), hf.get("mlp_only_layers") or ()
    return tuple(i for i in range(positive(hf, "num_hidden_layers")) if i in dense or (i + 1) % step)


def split_experts(name: str, tensor: np.ndarray) -> dict[str, np.ndarray] | None:
    """Divide a stored tensor with all experts of a layer into tensors of each expert, by name.

    Return None for any other tensor.

    `transformers` stores `gate_up_proj [E, 2f, D]` and `down_proj [E, D, f]`, for `E` experts of `f` features.
    """
    if not (found := _FUSED.fullmatch(name)) or tensor.ndim != 3:
        return None
    prefix, kind = found.groups()
    if kind == "down":
        return {f"{prefix}.{e}.down_proj.weight": part for e, part in enumerate(tensor)}
    half = tensor.shape[1] // 2
    return {
        f"{prefix}.{e}.{part}_proj.weight": tensor[e, rows]
        for e in range(len(tensor))
        for part, rows in (("gate", slice(half)), ("up", slice(half, None)))
    }
