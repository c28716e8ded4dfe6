"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from amoeba_jax.models.families.fields import Family, Fields, HfConfig, qwen_windows, require


def _fields(hf: HfConfig) -> Fields:
    require(hf, hidden_act="silu", mlp_bias=False)
    return {"qkv_bias": True, "sliding_windows": qwen_windows(hf)}


QWEN2 = Family(_fields)
