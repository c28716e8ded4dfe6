"""Norms round to bfloat16 where `transformers` does, compared with NumPy in float64."""

from collections.abc import Callable

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny_models import tiny_config

from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.layers import hidden_norm, rms_norm


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


FAMILY_NORMS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "llama2": lambda x, scale: rounded(rounded(x) * scale),
    "gpt-oss": lambda x, scale: rounded(x * scale),
    "gemma2": lambda x, scale: rounded(x * (scale + 1)),
}


@pytest.mark.parametrize("name", FAMILY_NORMS)
def test_norms_round_as_in_each_family(name: str):
    random, config = np.random.default_rng(0), ModelConfig.from_hf(tiny_config(name))
    x, scale = rounded(random.standard_normal((64, 96))), rounded(random.standard_normal(96))
    normalized = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + config.norm_eps)
    expected = FAMILY_NORMS[name](normalized, scale)
    wide, vector = jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale, jnp.bfloat16)
    for found in (
        rms_norm(wide, vector, config.norm_eps, config.norm_offset),
        hidden_norm(wide.T, vector, config.norm_eps, config.norm_offset).T,
    ):
        # A value between two bfloat16 numbers may be rounded either way. The other order changes a quarter of all.
        assert np.mean(np.asarray(found, np.float64) != expected) < 0.002
