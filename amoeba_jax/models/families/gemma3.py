"""Gemma 3, text only: Gemma 2 with norms of queries and keys, and another rotary base in layers with a window."""

from amoeba_jax.models.families.fields import Family, Fields, HfConfig, positive, require
from amoeba_jax.models.families.gemma2 import gemma_fields
from amoeba_jax.models.rope import read_rope


def _fields(hf: HfConfig) -> Fields:
    require(hf, attn_logit_softcapping=None)  # `transformers` ignores it in Gemma 3
    ropes, sizes = hf["rope_parameters"], (positive(hf, "max_position_embeddings"), positive(hf, "head_dim"))
    return gemma_fields(hf) | {
        "qk_norm": True,
        "rope": read_rope(ropes["full_attention"], *sizes),
        "local_rope": read_rope(ropes["sliding_attention"], *sizes),
    }


GEMMA3 = Family(_fields)
