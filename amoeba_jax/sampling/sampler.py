"""Sampler: choose the next tokens on the device, in the order of vLLM's sampler.

First, masks (allowed tokens, grammars, bad words, stop tokens before `min_tokens`), biases and penalties change the
logits. With temperature 0, the most probable token is then chosen. At any other temperature, the temperature, min-p,
top-k and top-p are applied in this order, and a token is drawn. A filter keeps tokens with equal logits together: with
top-k 2 and the logits 3, 2, 2, all three tokens are kept.

The token of a row depends only on the row's logits, settings and state, never on other rows. The noise of a row comes
from the key `fold_in(key(seed), position)`. So a request's tokens are the same in any batch.

Logits are `[V, R]`, as a step returns them, and are never transposed as a whole. Times in comments are for XLA on CPU
with 49,152 tokens and 32 rows, on two cores.

If the largest logit of a row is not finite, the host gets `NO_TOKEN`. A NaN in the hidden state is always reported in
this way, because it turns all logits of the row into NaN. If damaged weights turn only one logit into NaN, XLA's
maximum on CPU may ignore this logit. Its token is then never chosen, and nothing is reported.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from amoeba_jax.sampling.rows import (
    ANY_TOKEN,
    BELOW_MIN_TOKENS,
    CONSTRAINED,
    FIELDS,
    FLOATS,
    IN_PROMPT,
    LOGPROBS,
    NO_ALLOWED_TOKEN,
    NO_TOKEN,
    ONE_OUTPUT,
    STOPS,
    USES_STATE,
)
from amoeba_jax.sampling_params import MAX_LOGPROBS

# Largest `top_k` that uses `_largest`: 2 ms, in place of 12 ms by bisection.
_SMALL_TOP_K = 64
# Largest number of tokens in a block, for `argmax` and for `_largest`. Block sizes divide the vocabulary.
_ARGMAX_BLOCK, _LARGEST_BLOCK = 256, 32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = 0x1BD11BDA
_FLOAT_ONE, _FLOAT_INF = 0x3F800000, 0x7F800000


def set_state(
    flags: Int32[Array, "slots V"],
    bias: Float[Array, "slots V"],
    slot: Int32[Array, ""],
    flags_row: Int32[Array, " V"],
    bias_row: Float[Array, " V"],
) -> tuple[Int32[Array, "slots V"], Float[Array, "slots V"]]:
    """Replace the rows of one slot (index of a sequence) in `flags` and `bias`, and return both arrays.

    Donates `flags` and `bias`.
    """
    return flags.at[slot].set(flags_row), bias.at[slot].set(bias_row)


def sample(
    logits: Float[Array, "V R"], last_tokens: Int32[Array, " slots"], packed: Int32[Array, " size"]
) -> tuple[Int32[Array, " slots"], Int32[Array, "R 1"]]:
    """Choose the next tokens of sequences without masks, bad words, penalties, grammars or log-probabilities.

    `packed` comes from `rows.pack`. Returns `(last_tokens, result)`: the updated last token of each slot, and the
    chosen tokens for `unpack_result`.
    """
    fields, _ = _unpack(packed, logits.shape[1])
    tokens, max_logit = _choose(logits, fields)
    return last_tokens.at[fields["slot"]].set(tokens), for_host(tokens, max_logit)[:, None]


def sample_full(
    logits: Float[Array, "V R"],
    last_tokens: Int32[Array, " slots"],
    flags: Int32[Array, "slots V"],
    bias: Float[Array, "slots V"],
    packed: Int32[Array, " size"],
    masks: Int32[Array, "R words"],
) -> tuple[Int32[Array, " slots"], Int32[Array, "slots V"], Int32[Array, "R columns"]]:
    """Choose the next tokens of any sequences, with log-probabilities. Return updated `(last_tokens, flags, result)`.

    Donates `flags`. `packed` comes from `rows.pack`. `result` has 3 + 2 * `MAX_LOGPROBS` columns for `unpack_result`.
    The log-probabilities are computed from the given `logits`, without masks and penalties.

    A row with a grammar gets only tokens whose bits in `masks` are set (`rows.Masks`). If masks, biases and bad words
    leave no token for this row, the host gets `NO_ALLOWED_TOKEN`.
    """
    rows = logits.shape[1]
    fields, pairs = _unpack(packed, rows)
    slots, options = fields["slot"], fields["options"]
    uses_state, constrained = options & USES_STATE > 0, options & CONSTRAINED > 0
    required, banned = pairs
    last = last_tokens.at[slots].get(mode="clip")[:, None]
    used = jnp.arange(pairs.shape[2]) < fields["num_pairs"][:, None]
    matches = used & ((required == ANY_TOKEN) | (required == last))

    def mask(processed: jax.Array) -> jax.Array:
        return jnp.where(allowed_tokens(masks, len(logits)) | ~constrained, processed, -jnp.inf)

    def process() -> jax.Array:
        processed = lax.cond(uses_state.any(), lambda: _with_state(logits, flags, bias, fields), lambda: logits)
        # Unused pairs point out of range.
        columns = jnp.where(matches, jnp.arange(rows)[:, None], rows)
        processed = processed.at[banned, columns].set(-jnp.inf)
        processed = lax.cond(constrained.any(), mask, lambda x: x, processed)
        # Masks and limits must not hide logits that are not finite.
        as_given = (processed.max(axis=0) == -jnp.inf) & ~constrained | ~jnp.isfinite(logits.max(axis=0))
        return jnp.where(as_given, logits, processed)

    processed = lax.cond((uses_state | constrained).any() | matches.any(), process, lambda: logits)
    tokens, max_logit = _choose(processed, fields)
    host_tokens = for_host(tokens, max_logit)
    none_left = constrained & (max_logit == -jnp.inf)  # logits that are not finite come through unchanged
    host_tokens = jnp.where(none_left, NO_ALLOWED_TOKEN, host_tokens)

    wants_logprobs = options & LOGPROBS > 0
    columns = lax.cond(
        wants_logprobs.any(),
        lambda: jnp.where(wants_logprobs[:, None], token_logprobs(logits, tokens), 0),
        lambda: jnp.zeros((rows, 2 + 2 * MAX_LOGPROBS), jnp.int32),
    )
    return (
        last_tokens.at[slots].set(tokens),
        flags.at[slots, tokens].add(jnp.where(uses_state, ONE_OUTPUT, 0)),
        jnp.concatenate([host_tokens[:, None], columns], axis=1),
    )


def allowed_tokens(masks: Int32[Array, "R words"], vocab_size: int) -> Bool[Array, "V R"]:
    """Return whether each token is allowed in each row, from packed masks (see `Masks`)."""
    bits = (masks.T[:, None] >> jnp.arange(32, dtype=jnp.int32)[:, None]) & 1
    return bits.reshape(-1, len(masks))[:vocab_size] > 0


def token_logprobs(
    logits: Float[Array, "V positions"], targets: Int32[Array, " positions"]
) -> Int32[Array, "positions columns"]:
    """Return the log-probability and rank of each target, and the most probable tokens, packed for `unpack_logprobs`.

    The result has 2 + 2 * `MAX_LOGPROBS` columns. For the positions of a prompt, `targets` are the next tokens.
    """
    max_logit = logits.max(axis=0)
    log_mass = jnp.log(jnp.where(logits > -jnp.inf, jnp.exp(logits - max_logit), 0).sum(axis=0))
    chosen = _take(logits, targets)
    rank = (logits >= chosen).sum(axis=0, dtype=jnp.int32)
    top = min(MAX_LOGPROBS, logits.shape[0])
    top_logits, top_ids = _largest(logits, top)
    logprobs = jnp.concatenate([chosen[:, None], top_logits], axis=1) - max_logit[:, None] - log_mass[:, None]
    padding = ((0, 0), (0, MAX_LOGPROBS - top))
    top_ids = jnp.pad(top_ids, padding, constant_values=-1)
    bits = lax.bitcast_convert_type(jnp.pad(logprobs, padding, constant_values=-jnp.inf), jnp.int32)
    return jnp.concatenate([bits[:, :1], rank[:, None], top_ids, bits[:, 1:]], axis=1)


def _unpack(packed: Int32[Array, " size"], num_rows: int) -> tuple[dict[str, jax.Array], Int32[Array, "2 R pairs"]]:
    """Split `packed` into `(fields, pairs)`: a dictionary of fields, each `[R]`, and the banned pairs (`rows.Pairs`).

    The inputs of `sample` have 0 pairs.
    """
    size = len(FIELDS) * num_rows
    fields: dict[str, jax.Array] = dict(zip(FIELDS, packed[:size].reshape(len(FIELDS), num_rows), strict=True))
    fields |= {name: lax.bitcast_convert_type(fields[name], jnp.float32) for name in FLOATS}
    return fields, packed[size:].reshape(2, num_rows, -1)


def _with_state(
    logits: Float[Array, "V R"],
    flags: Int32[Array, "slots V"],
    bias: Float[Array, "slots V"],
    fields: dict[str, jax.Array],
) -> Float[Array, "V R"]:
    """Apply masks, biases and penalties to rows with the option `USES_STATE`. Other rows are returned unchanged."""
    row_flags = flags.at[fields["slot"]].get(mode="clip").T
    processed = logits + bias.at[fields["slot"]].get(mode="clip").T
    held_back = (fields["options"] & BELOW_MIN_TOKENS > 0) & (row_flags & STOPS > 0)
    processed = jnp.where(held_back, -jnp.inf, processed)
    count = row_flags // ONE_OUTPUT
    seen = (row_flags & IN_PROMPT > 0) | (count > 0)
    repetition = jnp.where(seen, fields["repetition_penalty"], 1)
    processed = jnp.where(processed > 0, processed / repetition, processed * repetition)
    processed -= fields["frequency_penalty"] * count.astype(jnp.float32)
    processed -= fields["presence_penalty"] * (count > 0)
    # A tiny repetition penalty must not turn different logits into infinity.
    processed = jnp.minimum(processed, jnp.finfo(jnp.float32).max)
    return jnp.where(fields["options"] & USES_STATE > 0, processed, logits)


def for_host(tokens: Int32[Array, " R"], max_logit: Float[Array, " R"]) -> Int32[Array, " R"]:
    """Return the tokens for the host: the chosen tokens, with `NO_TOKEN` in rows whose `max_logit` is not finite."""
    return jnp.where(jnp.isfinite(max_logit), tokens, NO_TOKEN)


def _choose(logits: Float[Array, "V R"], fields: dict[str, jax.Array]) -> tuple[Int32[Array, " R"], Float[Array, " R"]]:
    """Choose a token for each row. Return the tokens, and the largest logit of each row.

    If a row's temperature is 0, the token is the most probable token, or the first of several equally probable tokens.
    If the temperature is higher, the token is drawn.
    """
    greedy, max_logit = argmax(logits)
    draws = fields["temperature"] > 0

    def drawn() -> jax.Array:
        return jnp.where(draws, _draw(logits, max_logit, fields), greedy)

    return lax.cond(draws.any(), drawn, lambda: greedy), max_logit


def _draw(
    logits: Float[Array, "V R"], max_logit: Float[Array, " R"], fields: dict[str, jax.Array]
) -> Int32[Array, " R"]:
    """Draw a token for each row by the Gumbel-max trick. `max_logit` is the largest logit of each row.

    The score of a token is its scaled logit plus noise. The token with the best score is drawn if it is inside the top
    p. If it is outside the top p, the token and all less probable tokens are removed. The token with the best score of
    the remaining tokens is tried next. The first try succeeds with probability p or more. No sort is needed.
    """
    top_p = fields["top_p"]
    floor = jnp.maximum(jnp.log(fields["min_p"]), _top_k_floor(logits, max_logit, fields))
    scaled = _scaled(logits, max_logit, fields)
    noise = _gumbel(fields["seed"], fields["position"], logits.shape[0])
    scores = jnp.where(scaled >= floor, scaled + noise, -jnp.inf)
    tokens, _ = argmax(scores)

    def top_p_tokens() -> jax.Array:
        scaled = _scaled(logits, max_logit, fields)
        mass = jnp.where(scaled >= floor, jnp.exp(scaled), 0)
        limit = top_p * mass.sum(axis=0)

        def judge(tokens: jax.Array) -> tuple[jax.Array, ...]:
            value = _take(scaled, tokens)
            higher = jnp.where(scaled > value, mass, 0).sum(axis=0)
            # The largest logit is always inside. Rows of NaN or infinity count as inside, or the loop would never end.
            return tokens, value, (top_p < 1) & (higher >= limit) & (value < 0) & (max_logit < jnp.inf)

        def attempt(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """Try the next token in rows whose token was outside the top p. The other rows keep their token."""
            pivot, _, value, outside = state
            pivot = jnp.where(outside, value, pivot)
            return pivot, *judge(argmax(jnp.where(scaled > pivot, scores, -jnp.inf))[0])

        start = (jnp.full_like(max_logit, -jnp.inf), *judge(tokens))
        return lax.while_loop(lambda state: state[-1].any(), attempt, start)[1]

    return lax.cond((top_p < 1).any(), top_p_tokens, lambda: tokens)


def _scaled(
    logits: Float[Array, "V R"], max_logit: Float[Array, " R"], fields: dict[str, jax.Array]
) -> Float[Array, "V R"]:
    """Return `(logits - max_logit) / temperature`.

    All results are 0 or less. A tiny temperature thus cannot turn several results into +infinity. Each branch of
    `_draw` calls this function again, which takes less time than storing the results.
    """
    return (logits - max_logit) / jnp.maximum(fields["temperature"], jnp.finfo(jnp.float32).tiny)


def _top_k_floor(
    logits: Float[Array, "V R"], max_logit: Float[Array, " R"], fields: dict[str, jax.Array]
) -> Float[Array, " R"]:
    """Return the `top_k`-th largest scaled logit of each row. Return -inf for rows with `top_k` below 1.

    The algorithm depends on the largest `top_k` of all rows. All algorithms return the same bits.
    """
    vocab_size, rows = logits.shape
    few = min(_SMALL_TOP_K, vocab_size)
    k = jnp.minimum(fields["top_k"], vocab_size)

    def small() -> jax.Array:
        values, _ = _largest(_scaled(logits, max_logit, fields), few)
        return jnp.take_along_axis(values, jnp.maximum(k - 1, 0)[:, None], axis=1)[:, 0]

    branches = [lambda: jnp.full(rows, -jnp.inf), small, lambda: _kth_largest(_scaled(logits, max_logit, fields), k)]
    found = lax.switch(jnp.where(k.max() <= 0, 0, jnp.where(k.max() <= few, 1, 2)), branches)
    return jnp.where(k > 0, found, -jnp.inf)


def _gumbel(seeds: Int32[Array, " R"], positions: Int32[Array, " R"], size: int) -> Float[Array, "V R"]:
    """Return the same noise as `jax.random.gumbel(fold_in(key(seed), position), [size])` for each row.

    On CPU, this function takes 4 ms, and `jax.random` takes 14 ms.
    """

    def key(seed: jax.Array, position: jax.Array) -> jax.Array:
        seeded = jax.random.key(seed.astype(jnp.uint32), impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(seeded, position))

    high, low = _threefry(jax.vmap(key)(seeds, positions), jnp.arange(size, dtype=jnp.uint32)[:, None])
    mantissa = (high ^ low) >> 9
    uniform = lax.bitcast_convert_type(mantissa | _FLOAT_ONE, jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))


def _threefry(keys: UInt32[Array, "R 2"], counts: UInt32[Array, "V 1"]) -> tuple[UInt32[Array, "V R"], ...]:
    """Return the two output words of Threefry-2x32 with 20 rounds, for the inputs `(0, count)` (Salmon et al. 2011)."""
    schedule = (keys[:, 0], keys[:, 1], keys[:, 0] ^ keys[:, 1] ^ _KEY_PARITY)
    high, low = schedule[0], counts + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            high = high + low
            low = ((low << rotation) | (low >> (32 - rotation))) ^ high
        high, low = high + schedule[(group + 1) % 3], low + schedule[(group + 2) % 3] + (group + 1)
    return high, low


def _take(x: Float[Array, "V R"], tokens: Int32[Array, " R"]) -> Float[Array, " R"]:
    """Return the value of one token of each row."""
    return jnp.take_along_axis(x, tokens[None], axis=0)[0]


def _block_maxima(x: Float[Array, "V R"], most: int) -> tuple[int, Float[Array, "blocks R"]]:
    """Divide the vocabulary into equal blocks of at most `most` tokens.

    Return the number of tokens in a block, and the largest value of each block.
    """
    size = math.gcd(x.shape[0], most)
    return size, x.reshape(-1, size, x.shape[1]).max(axis=1)


def argmax(x: Float[Array, "V R"]) -> tuple[Int32[Array, " R"], Float[Array, " R"]]:
    """Return the token with the largest value in each row, and that value. Of equal values, the first token counts.

    In a row with NaN, the token is arbitrary. The search first finds the block of tokens with the largest value, and
    then the token in this block. On CPU this takes 0.7 ms. `jnp.argmax` takes 4 ms, because XLA on CPU does not
    vectorize it.
    """
    last = x.shape[0] - 1
    size, maxima = _block_maxima(x, _ARGMAX_BLOCK)
    largest = maxima.max(axis=0)
    blocks = jnp.arange(len(maxima), dtype=jnp.int32)[:, None]
    block = jnp.where(maxima == largest, blocks, len(maxima) - 1).min(axis=0)
    tokens = block * size + jnp.arange(size, dtype=jnp.int32)[:, None]
    values = jnp.take_along_axis(x, tokens, axis=0)
    return jnp.where(values == largest, tokens, last).min(axis=0), largest


def _largest(x: Float[Array, "V R"], k: int) -> tuple[Float[Array, "R k"], Int32[Array, "R k"]]:
    """Return the k largest values of each row and their tokens, in the order of `lax.top_k(x.T, k)`.

    The vocabulary is divided into blocks. Only the k blocks with the largest maxima are searched, because the k largest
    values are in them.
    """
    size, maxima = _block_maxima(x, _LARGEST_BLOCK)
    if len(maxima) <= k:
        values, tokens = lax.top_k(x.T, k)
        return values, tokens
    blocks = jnp.sort(lax.top_k(maxima.T, k)[1], axis=1)
    tokens = (blocks[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(-1, k * size)
    values, places = lax.top_k(jnp.take_along_axis(x, tokens.T, axis=0).T, k)
    return values, jnp.take_along_axis(tokens, places, axis=1)


def _kth_largest(x: Float[Array, "V R"], k: Int32[Array, " R"]) -> Float[Array, " R"]:
    """Return the k-th largest value of each row. All values of `x` must be at most 0.

    The bits of the result are found one after another, by bisection.
    """

    def value(bits: jax.Array) -> jax.Array:
        return -lax.bitcast_convert_type(jnp.minimum(bits, _FLOAT_INF), jnp.float32)

    def set_bit(index: jax.Array, found: jax.Array) -> jax.Array:
        lower = found + (1 << (30 - index))
        return jnp.where((x > value(lower)).sum(axis=0) < k, lower, found)

    return value(lax.fori_loop(0, 31, set_bit, jnp.zeros(x.shape[1], jnp.int32)))
