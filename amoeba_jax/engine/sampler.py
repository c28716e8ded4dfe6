"""Choose next tokens on the device."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


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
    its instance or its tensor-parallel degree. Greedy batches skip the sorting altogether.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        sampled = _draw(logits, temperature, top_k, top_p, min_p, seeds, positions)
        return jnp.where(temperature > 0, sampled, greedy)

    return lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)


def _draw(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    scaled = logits / jnp.where(temperature > 0, temperature, 1)[:, None]
    order = jnp.argsort(-scaled, axis=-1)
    probabilities = jax.nn.softmax(jnp.take_along_axis(scaled, order, axis=-1), axis=-1)
    rank = jnp.arange(logits.shape[-1])
    limit = jnp.where(top_k > 0, top_k, logits.shape[-1])[:, None]
    keep = rank < limit
    # As vLLM: top-k first, then top-p over what is left, then min-p.
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
    best = jnp.argmax(scores, axis=-1)
    return jnp.take_along_axis(order, best[:, None], axis=-1)[:, 0].astype(jnp.int32)
