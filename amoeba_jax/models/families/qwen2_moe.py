"""Qwen2-MoE: Qwen2 with routed experts, and one shared expert for every token."""

from amoeba_jax.models.families.experts import dense_layers, read_experts, split_experts
from amoeba_jax.models.families.fields import Family, Fields, HfConfig, positive, qwen_windows, require


def _fields(hf: HfConfig) -> Fields:
    require(hf, hidden_act="silu")
    shared = positive(hf, "shared_expert_intermediate_size")
    normalized = bool(hf.get("norm_topk_prob"))
    return {
        "qkv_bias": bool(hf.get("qkv_bias", True)),
        "sliding_windows": qwen_windows(hf),
        "experts": read_experts(hf, size="moe_intermediate_size", normalized=normalized, shared_ffn_size=shared),
        "dense_layers": dense_layers(hf),
    }


QWEN2_MOE = Family(_fields, lambda config: split_experts)
