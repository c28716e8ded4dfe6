"""Qwen3-MoE: Qwen3 with experts in all or some layers."""

from amoeba_jax.models.families.experts import dense_layers, read_experts, split_experts
from amoeba_jax.models.families.fields import Family, Fields, HfConfig, require, same_window


def _fields(hf: HfConfig) -> Fields:
    require(hf, hidden_act="silu")
    bias = bool(hf.get("attention_bias", False))
    experts = read_experts(hf, size="moe_intermediate_size", normalized=bool(hf.get("norm_topk_prob")))
    return {
        "qk_norm": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "sliding_windows": same_window(hf),
        "experts": experts,
        "dense_layers": dense_layers(hf),
    }


QWEN3_MOE = Family(_fields, lambda config: split_experts)
