"""gpt-oss: biased experts with a clamped activation, attention sinks, windows in every other layer, MXFP4 weights."""

import re

import numpy as np

from amoeba_jax.models.families.experts import read_experts
from amoeba_jax.models.families.fields import Family, Fields, HfConfig, require, windows_by_type

_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(?:(\d+)\.)?(gate_up|down)_proj(_bias|_rows)?")


def _fields(hf: HfConfig) -> Fields:
    require(hf, hidden_act="silu", swiglu_alpha=1.702, swiglu_limit=7.0)
    bias = bool(hf.get("attention_bias", True))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "sliding_windows": windows_by_type(hf),
        "sinks": True,
        "activation": "clamped_silu",
        "norm_offset": 0.0,
        "experts": read_experts(hf, size="intermediate_size", normalized=True, biased=True),
    }


def _split(name: str, tensor: np.ndarray) -> dict[str, np.ndarray] | None:
    """Split a stored tensor of experts into tensors of each expert, and rename tensors of the router.

    Return None for any other tensor. Stored matrices are `[E, in, out]`. Expanded MXFP4 matrices are `[out, in]`, one
    for each expert, and their names end in `_rows` (`Mxfp4Checkpoint`). In both forms, gate and up features alternate.
    """
    if ".mlp.router." in name:
        return {name.replace(".mlp.router.", ".mlp.gate."): tensor}
    if not (found := _EXPERTS.fullmatch(name)):
        return None
    prefix, expert, kind, form = found.groups()
    suffix = "bias" if form == "_bias" else "weight"
    parts: dict[str, np.ndarray] = {}
    for index, part in enumerate(tensor) if expert is None else [(int(expert), tensor)]:
        rows = part.T if form is None else part
        if kind == "down":
            parts[f"{prefix}.{index}.down_proj.{suffix}"] = rows
        else:
            parts[f"{prefix}.{index}.gate_proj.{suffix}"] = rows[0::2]
            parts[f"{prefix}.{index}.up_proj.{suffix}"] = rows[1::2]
    return parts


GPT_OSS = Family(_fields, lambda config: _split, quantizations=("mxfp4",))
