"""Llama 1 to 3, and models of the same form, such as SmolLM2."""

from amoeba_jax.models.families.fields import Family, Fields, HfConfig, require


def _fields(hf: HfConfig) -> Fields:
    require(hf, hidden_act="silu", mlp_bias=False)
    bias = bool(hf.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias}


LLAMA = Family(_fields)
