"""Model families by `model_type`, with one file for each family. See docs/adding_a_model.md."""

from amoeba_jax.models.families.fields import Family
from amoeba_jax.models.families.gemma import GEMMA
from amoeba_jax.models.families.gemma2 import GEMMA2
from amoeba_jax.models.families.gemma3 import GEMMA3
from amoeba_jax.models.families.gpt_oss import GPT_OSS
from amoeba_jax.models.families.llama import LLAMA
from amoeba_jax.models.families.mistral import MISTRAL
from amoeba_jax.models.families.mixtral import MIXTRAL
from amoeba_jax.models.families.phi3 import PHI3
from amoeba_jax.models.families.qwen2 import QWEN2
from amoeba_jax.models.families.qwen2_moe import QWEN2_MOE
from amoeba_jax.models.families.qwen3 import QWEN3
from amoeba_jax.models.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt_oss": GPT_OSS,
    "phi3": PHI3,
}

_REASONS = {
    "deepseek_v2": "its multi-head latent attention is not implemented",
    "deepseek_v3": "its multi-head latent attention is not implemented",
    "gemma3": "its vision tower is not implemented; gemma3_text is",
    "llama4": "its chunked attention is not implemented",
    "qwen3_next": "its linear attention is not implemented",
}


def refusal(model_type: object) -> str:
    """Return the error message for a `model_type` that is not supported."""
    reason = f" ({_REASONS[model_type]})" if isinstance(model_type, str) and model_type in _REASONS else ""
    return f"model_type={model_type!r} is not supported{reason}: supported families are {', '.join(FAMILIES)}"
