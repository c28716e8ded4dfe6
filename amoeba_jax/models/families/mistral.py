"""Mistral. All layers have the sliding window. `layer_types` is ignored, as in `transformers`."""

from amoeba_jax.models.families.fields import Family, Fields, HfConfig, require, same_window


def _fields(hf: HfConfig) -> Fields:
    require(hf, hidden_act="silu", mlp_bias=False)
    return {"sliding_windows": same_window(hf)}


MISTRAL = Family(_fields)
