"""Draw next tokens on the device, for the rows that do not just want the likeliest."""

from collections.abc import Sequence as Rows

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from amoeba_jax.sampling_params import SamplingParams

_INTEGERS = ("seed", "position", "top_k")
_FLOATS = ("temperature", "top_p", "min_p")


def pack_sampling(rows: Rows[tuple[SamplingParams, int, int]], num_rows: int) -> Int32[np.ndarray, "6 R"]:
    """Sampling settings of a step as one array: `rows` are (settings, seed, position of the token to draw).

    Rows beyond those given are padding and draw greedily. Floats travel as their bits.
    """
    packed = np.zeros((len(_INTEGERS) + len(_FLOATS), num_rows), np.int32)
    floats = packed[len(_INTEGERS) :].view(np.float32)
    floats[_FLOATS.index("top_p")] = 1
    for row, (params, seed, position) in enumerate(rows):
        packed[: len(_INTEGERS), row] = np.uint32(seed).view(np.int32), position, max(params.top_k, 0)
        floats[:, row] = params.temperature, params.top_p, params.min_p
    return packed


def sample_packed(logits: Float[Array, "R V"], packed: Int32[Array, "6 R"]) -> Int32[Array, " R"]:
    """`sample` with its settings as `pack_sampling` lays them out."""
    seed, position, top_k = packed[: len(_INTEGERS)]
    temperature, top_p, min_p = lax.bitcast_convert_type(packed[len(_INTEGERS) :], jnp.float32)
    return sample(logits, temperature, top_k, top_p, min_p, seed, position)


def sample(
    logits: Float[Array, "R V"],
    temperature: Float[Array, " R"],
    top_k: Int32[Array, " R"],
    top_p: Float[Array, " R"],
    min_p: Float[Array, " R"],
    seeds: Int32[Array, " R"],
    positions: Int32[Array, " R"],
) -> Int32[Array, " R"]:
    """Next token of each row: the likeliest where temperature is 0, else drawn from the filtered distribution.

    The random key of a row is `fold_in(key(seed), position)`, so a request's tokens do not depend on its batch,
    its instance or its tensor-parallel degree. Filters apply in this order: top-k, top-p over what is left,
    then min-p.
    """
    # Less the peak, or a tiny temperature would take the likeliest tokens to infinity, all alike.
    peak = logits.max(axis=-1, keepdims=True)
    scaled = (logits - peak) / jnp.where(temperature > 0, temperature, 1)[:, None]
    order = jnp.argsort(-scaled, axis=-1)
    probabilities = jax.nn.softmax(jnp.take_along_axis(scaled, order, axis=-1), axis=-1)
    rank = jnp.arange(logits.shape[-1])
    keep = rank < jnp.where(top_k > 0, top_k, logits.shape[-1])[:, None]
    probabilities = jnp.where(keep, probabilities, 0)
    probabilities = probabilities / probabilities.sum(-1, keepdims=True)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    keep &= before < top_p[:, None]
    keep &= probabilities >= min_p[:, None] * probabilities[:, :1]
    keep |= rank == 0

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed.astype(jnp.uint32)), position)
        return jax.random.gumbel(key, (logits.shape[-1],), jnp.float32)

    # Noise belongs to the token, not to its rank: ties in the sort cannot change the outcome.
    gumbel = jnp.take_along_axis(jax.vmap(noise)(seeds, positions), order, axis=-1)
    scores = jnp.where(keep, jnp.log(jnp.where(keep, probabilities, 1)) + gumbel, -jnp.inf)
    best = jnp.where(temperature > 0, jnp.argmax(scores, axis=-1), 0)
    return jnp.take_along_axis(order, best[:, None], axis=-1)[:, 0].astype(jnp.int32)
