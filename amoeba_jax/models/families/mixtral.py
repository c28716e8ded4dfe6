"""Mixtral: Mistral with experts."""

import re

import numpy as np

from amoeba_jax.models.families.experts import read_experts, split_experts
from amoeba_jax.models.families.fields import Family, Fields, HfConfig, require, same_window

_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _fields(hf: HfConfig) -> Fields:
    require(hf, hidden_act="silu")
    experts = read_experts(hf, size="intermediate_size", normalized=True)
    return {"experts": experts, "sliding_windows": same_window(hf)}


def _split(name: str, tensor: np.ndarray) -> dict[str, np.ndarray] | None:
    """Rename a published tensor, such as `block_sparse_moe.experts.0.w1`, to the name in `transformers`."""
    renamed = name.replace(".block_sparse_moe.", ".mlp.")
    renamed = re.sub(r"(\.experts\.\d+)\.(w[123])\.", lambda it: f"{it[1]}.{_NAMES[it[2]]}.", renamed)
    return {renamed: tensor} if renamed != name else split_experts(name, tensor)


MIXTRAL = Family(_fields, lambda config: _split)
