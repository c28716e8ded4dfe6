"""Gemma: Llama with norms of 1 + w, scaled embeddings and another activation."""

from amoeba_jax.models.families.fields import Family, Fields, HfConfig, positive, require


def _fields(hf: HfConfig) -> Fields:
    require(hf, hidden_act="gelu_pytorch_tanh")
    if hf.get("use_bidirectional_attention"):
        require(hf, use_bidirectional_attention=False)
    bias = bool(hf.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "activation": "gelu_tanh",
        "norm_offset": 1.0,
        "embedding_scale": float(positive(hf, "hidden_size")) ** 0.5,
    }


GEMMA = Family(_fields)
