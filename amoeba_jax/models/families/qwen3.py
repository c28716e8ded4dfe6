"""Qwen3: norms of queries and keys."""

from amoeba_jax.models.families.fields import Family, Fields, HfConfig, qwen_windows, require


def _fields(hf: HfConfig) -> Fields:
    require(hf, hidden_act="silu", mlp_bias=False)
    bias = bool(hf.get("attention_bias", False))
    return {"qk_norm": True, "qkv_bias": bias, "output_bias": bias, "sliding_windows": qwen_windows(hf)}


QWEN3 = Family(_fields)
