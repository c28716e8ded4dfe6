"""Phi-3. One stored tensor holds queries, keys and values, and another holds gate and up of the FFN."""

import re
from typing import Any

import numpy as np

from amoeba_jax.models.families.fields import Family, Fields, HfConfig, Split, require, same_window

_FUSED = re.compile(r"(.*)\.(qkv|gate_up)_proj\.weight")


def _fields(hf: HfConfig) -> Fields:
    require(hf, hidden_act="silu")
    return {"sliding_windows": same_window(hf)}


def _split(config: Any) -> Split:
    queries, keys = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    edges = {"qkv": [queries, queries + keys], "gate_up": [config.ffn_size]}

    def split(name: str, tensor: np.ndarray) -> dict[str, np.ndarray] | None:
        if not (found := _FUSED.fullmatch(name)):
            return None
        prefix, fused = found.groups()
        parts = np.split(tensor, edges[fused])
        names = ("q", "k", "v") if fused == "qkv" else ("gate", "up")
        return {f"{prefix}.{part}_proj.weight": rows for part, rows in zip(names, parts, strict=True)}

    return split


PHI3 = Family(_fields, _split)
