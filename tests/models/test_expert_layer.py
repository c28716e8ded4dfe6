"""Experts compute what a loop over tokens computes, for every distribution of the tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from amoeba_jax.models.experts import all_experts, block_tokens, used_experts

HIDDEN, FEATURES = 6, 5


def expert(x: jax.Array, parameters) -> jax.Array:
    up, down = parameters
    return down @ jnp.tanh(up @ x)


def looped(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Sum over the experts of each token, in float64; ids past the last expert belong to other shards."""
    result = np.zeros(x.shape)
    for (row, token), one in np.ndenumerate(ids):
        if one < len(up):
            result[:, token] += weights[row, token] * (down[one] @ np.tanh(up[one] @ x[:, token]))
    return result


# Experts, experts of a token, tokens, and ids that occur (None: all).
CASES = {
    "one token": (4, 2, 1, None),
    "few tokens": (8, 3, 5, None),
    "all experts": (4, 4, 7, None),
    "blocks of one expert": (4, 1, 90, [2]),
    "one expert never used": (4, 2, 33, [0, 1, 3]),
    "last expert only": (3, 1, 17, [2]),
    "none of this shard": (3, 2, 9, [3]),
    "many tokens": (5, 2, 300, None),
}


@pytest.mark.parametrize("way", [used_experts, all_experts])
@pytest.mark.parametrize("case", CASES)
def test_experts_compute_their_tokens(case: str, way):
    count, top_k, tokens, occurring = CASES[case]
    random = np.random.default_rng(1)
    choices = np.arange(count + 1) if occurring is None else np.array(occurring)
    # An id past the last expert may occur several times: its pairs belong to other shards.
    ids = np.stack([random.choice(choices, top_k, replace=len(choices) < top_k) for _ in range(tokens)], axis=1)
    x, weights = random.standard_normal((HIDDEN, tokens)), random.random((top_k, tokens))
    up, down = random.standard_normal((count, FEATURES, HIDDEN)), random.standard_normal((count, HIDDEN, FEATURES))
    arrays = [jnp.asarray(it, jnp.float32) for it in (x, weights, up, down)]
    result = jax.jit(lambda x, w, up, down: way(expert, x, jnp.asarray(ids), w, (up, down)))(*arrays)
    np.testing.assert_allclose(result, looped(x, ids, weights, up, down), atol=1e-4)


@pytest.mark.parametrize("way", [used_experts, all_experts])
def test_a_nan_stays_in_its_token(way):
    x = jnp.ones((HIDDEN, 8)).at[:, 3].set(jnp.nan)
    ids, weights = jnp.tile(jnp.arange(8)[None] % 2, (1, 1)), jnp.ones((1, 8))
    result = np.asarray(
        way(expert, x, ids, weights, (jnp.ones((2, FEATURES, HIDDEN)), jnp.ones((2, HIDDEN, FEATURES))))
    )
    assert np.isnan(result[:, 3]).all()
    assert np.isfinite(np.delete(result, 3, axis=1)).all()


def test_blocks_have_about_the_mean_number_of_tokens():
    assert [block_tokens(pairs, 32, tokens) for pairs, tokens in ((4, 1), (32, 8), (256, 64), (8192, 2048))] == [
        1,
        4,
        8,
        64,
    ]
