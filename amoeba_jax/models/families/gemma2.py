"""Gemma 2: norms before and after each module, soft caps, and a sliding window in every other layer."""

from amoeba_jax.models.families.fields import Family, Fields, HfConfig, positive, require, soft_cap, windows_by_type


def gemma_fields(hf: HfConfig) -> Fields:
    """Return the config fields that Gemma 2 and Gemma 3 share."""
    require(hf, hidden_activation="gelu_pytorch_tanh")
    if hf.get("use_bidirectional_attention"):
        require(hf, use_bidirectional_attention=False)
    bias = bool(hf.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "sliding_windows": windows_by_type(hf),
        "activation": "gelu_tanh",
        "norm_offset": 1.0,
        "post_norms": True,
        "embedding_scale": float(positive(hf, "hidden_size")) ** 0.5,
        "attention_scale": float(positive(hf, "query_pre_attn_scalar")) ** -0.5,
        "attention_soft_cap": soft_cap(hf, "attn_logit_softcapping"),
        "logit_soft_cap": soft_cap(hf, "final_logit_softcapping"),
    }


GEMMA2 = Family(gemma_fields)
