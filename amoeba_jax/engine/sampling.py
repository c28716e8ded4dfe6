"""Choose next tokens on the device, in the order of vLLM's sampler.

Logits are masked (allowed tokens, bad words, stop tokens before `min_tokens`), biased and penalized. The likeliest
token is taken where temperature is 0. Otherwise one is drawn: temperature, then min-p, top-k of what is left, top-p
of what is left then. Tokens as likely as the last one that a filter keeps are kept too.

A row's token depends on its own logits, settings and state, and on no other row. Its noise comes from the key
`fold_in(key(seed), position)` and belongs to token ids. So a request's tokens are the same in any batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import Logprob
from amoeba_jax.sampling_params import MAX_LOGPROBS, SamplingParams
from amoeba_jax.tokenizer import Tokenizer

NO_SLOT = 2**31 - 1
"""Slot of a row whose token is not recorded: padding, or a chunk that does not end its prompt."""
ANY_TOKEN = -1
"""In a pair of a bad word: its last token is banned whatever came before."""

# Of a row's `options`.
_USES_STATE, _BELOW_MIN_TOKENS, _LOGPROBS = 1, 2, 4
# Of a token's entry in `flags`; the bits above count how often it was generated.
_IN_PROMPT, _STOPS, _ONE_OUTPUT = 1, 2, 4

_FLOATS: tuple[str, ...] = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
# Of a row, as they are packed. From `options` on they are a sequence's own, but for `_BELOW_MIN_TOKENS`.
_FIELDS: tuple[str, ...] = ("slot", "position", "options", "seed", "top_k", *_FLOATS)
_OPTIONS = _FIELDS.index("options")

_SMALLEST_PAIR_BUCKET = 8
# `lax.top_k` of so few takes a tenth of the time of bisection (XLA:CPU, 49152 tokens).
_SMALL_TOP_K = 64

BadWords = tuple[tuple[int, ...], ...]
Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class SamplingRow:
    """What sampling needs to know of one sequence, made once by `sampling_row`.

    Attributes:
        kind: "greedy" takes the likeliest token and wants nothing else, "draw" wants `draw`, "full" `draw_full`.
        uses_state: reads and counts in its slot's rows of `flags` and `bias`.
        stop_token_ids: what cannot come before `min_tokens`.
        banned: bad words of one token.
        bad_words: bad words of several tokens.
        settings: its part of a packed step, from `options` on.
    """

    params: SamplingParams
    vocab_size: int
    kind: Literal["greedy", "draw", "full"]
    uses_state: bool
    stop_token_ids: tuple[int, ...]
    banned: tuple[int, ...]
    bad_words: BadWords
    settings: Int32[np.ndarray, " fields"]


class StepRow(NamedTuple):
    """A sequence in one step: `pack` makes the device's inputs from these.

    Attributes:
        slot: where its state is, or `NO_SLOT`.
        position: of the token to choose, in the sequence; part of the random key.
        generated: tokens generated before it, those included that the host has not read yet.
        pairs: from `bad_word_pairs`.
    """

    row: SamplingRow
    slot: int
    position: int
    generated: int
    pairs: Sequence[Pair] = ()


class TokenLogprobs(NamedTuple):
    """Log-probabilities of tokens and of the likeliest ones in their places.

    Where the vocabulary has fewer than `MAX_LOGPROBS` tokens, the rest of the top is id -1 and -inf.
    """

    logprob: Float[np.ndarray, " N"]
    rank: Int32[np.ndarray, " N"]
    """Tokens at least as likely: 1 is the likeliest."""
    top_ids: Int32[np.ndarray, "N top"]
    top_logprobs: Float[np.ndarray, "N top"]


class SamplingResult(NamedTuple):
    """A step's tokens. `logprobs` is None after `draw`; after `draw_full` it has zeros for rows that want none."""

    tokens: Int32[np.ndarray, " R"]
    logprobs: TokenLogprobs | None


# Host, once for a sequence.


def sampling_row(
    params: SamplingParams, seed: int, vocab_size: int, eos_token_ids: Iterable[int], bad_words: BadWords = ()
) -> SamplingRow:
    """The device's view of one sequence's settings. `bad_words` are token ids, from `bad_word_ids`.

    `min_tokens` holds back end-of-sequence tokens with `ignore_eos` too, as in vLLM: they would end nothing, but a
    text that goes on after one is not what `min_tokens` asks for.
    """
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    banned = tuple(word[0] for word in bad_words if len(word) == 1)
    longer = tuple(word for word in bad_words if len(word) > 1)
    masked = params.logit_bias or params.allowed_token_ids is not None or banned or params.min_tokens > 0
    uses_state = bool(masked) or penalties != (1, 0, 0)
    wants_logprobs = params.logprobs is not None
    if uses_state or longer or wants_logprobs:
        kind = "full"
    else:
        kind = "draw" if params.temperature > 0 else "greedy"
    # Filters mean nothing where the likeliest token is taken: without them the device has less to do.
    top_k, top_p, min_p = (params.top_k, params.top_p, params.min_p) if params.temperature > 0 else (0, 1, 0)
    options = _USES_STATE * uses_state | _LOGPROBS * wants_logprobs
    integers = np.array([options, np.uint32(seed).view(np.int32), top_k], np.int32)
    floats = np.array([params.temperature, top_p, min_p, *penalties], np.float32)
    stops = {*params.stop_token_ids, *eos_token_ids}
    return SamplingRow(
        params=params,
        vocab_size=vocab_size,
        kind=kind,
        uses_state=uses_state,
        # A tokenizer can name an end beyond a model's logits.
        stop_token_ids=tuple(sorted(token for token in stops if token < vocab_size)),
        banned=banned,
        bad_words=longer,
        settings=np.concatenate([integers, floats.view(np.int32)]),
    )


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> BadWords:
    """Token ids of each word at the start of a text and after a space, where these differ.

    vLLM leaves out the form after a space if it has another length; here both are banned. Raises `RequestError`
    for a word that has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise RequestError(f"bad_words must have words that the tokenizer knows, got {word!r}")
            found[ids] = None
    return tuple(found)


def state_rows(
    row: SamplingRow, prompt: Sequence[int], output: Sequence[int]
) -> tuple[Int32[np.ndarray, " V"], Float[np.ndarray, " V"]]:
    """`(flags, bias)` of a slot that a sequence takes with `output` generated so far; `set_state` puts them there.

    `flags` says of each token whether it is in the prompt (bit 0), whether it is a stop token (bit 1), and how often
    it was generated (from bit 2). `bias` is added to logits: -inf for what must not come.
    """
    flags = np.zeros(row.vocab_size, np.int32)
    np.add.at(flags, np.asarray(output, np.int64), _ONE_OUTPUT)
    flags[np.asarray(prompt, np.int64)] |= _IN_PROMPT
    flags[list(row.stop_token_ids)] |= _STOPS
    allowed = row.params.allowed_token_ids
    bias = np.full(row.vocab_size, 0 if allowed is None else -np.inf, np.float32)
    bias[list(allowed or ())] = 0
    for token, value in dict(row.params.logit_bias).items():
        bias[token] += value
    bias[list(row.banned)] = -np.inf
    return flags, bias


# Host, in every step.


def bad_word_pairs(row: SamplingRow, output_known: Sequence[int], in_flight: bool) -> list[Pair]:
    """`(last token, banned token)`: what a row's next token must not be if the one before it is `last token`.

    Args:
        output_known: generated tokens that the host has read. A word's beginning counts only if all of it is here.
        in_flight: one more token was sampled and is on the device alone. Without one the host decides by itself,
            and says `ANY_TOKEN` for the last token.
    """
    pairs = []
    for word in row.bad_words:
        prefix = word[:-2] if in_flight else word[:-1]
        start = len(output_known) - len(prefix)
        if start >= 0 and tuple(output_known[start:]) == prefix:
            pairs.append((word[-2] if in_flight else ANY_TOKEN, word[-1]))
    return pairs


def pair_bucket(num_pairs: int) -> int:
    """Size that this many pairs are padded to: a power of two of at least 8."""
    return max(_SMALLEST_PAIR_BUCKET, 1 << (num_pairs - 1).bit_length())


def pack(rows: Sequence[StepRow], num_rows: int, num_pairs: int = 0) -> Int32[np.ndarray, " size"]:
    """A step's settings as one array of integers: all rows' slots, all their positions and so on, then pairs.

    Floats travel as their bits. Rows beyond those given are padding: they take the likeliest token and record
    nothing. `num_pairs` is what the program is compiled for, at least the pairs of all rows together.
    """
    size = len(_FIELDS) * num_rows
    packed = np.zeros(size + 3 * num_pairs, np.int32)
    fields = packed[:size].reshape(len(_FIELDS), num_rows)
    pairs = packed[size:].reshape(3, num_pairs)
    fields[0] = NO_SLOT
    pairs[0] = num_rows  # out of range: bans nothing
    filled = 0
    for index, (row, slot, position, generated, row_pairs) in enumerate(rows):
        fields[:, index] = slot, position, *row.settings
        fields[_OPTIONS, index] |= _BELOW_MIN_TOKENS * (generated < row.params.min_tokens)
        for last, banned in row_pairs:
            pairs[:, filled] = index, last, banned
            filled += 1
    return packed


def unpack_result(result: Int32[np.ndarray, "R columns"]) -> SamplingResult:
    """What `draw` or `draw_full` returned, once on the host."""
    return SamplingResult(result[:, 0], unpack_logprobs(result[:, 1:]) if result.shape[1] > 1 else None)


def unpack_logprobs(packed: Int32[np.ndarray, "N columns"]) -> TokenLogprobs:
    """What `token_logprobs` returned, once on the host."""
    floats = packed.view(np.float32)
    top = slice(2, 2 + MAX_LOGPROBS)
    return TokenLogprobs(floats[:, 0], packed[:, 1], packed[:, top], floats[:, top.stop :])


def logprob_entry(logprobs: TokenLogprobs, index: int, token: int, k: int) -> dict[int, Logprob]:
    """What a request gets to see for `token`, which is number `index` of `logprobs`: itself, then the `k` likeliest."""
    entry = {token: Logprob(float(logprobs.logprob[index]), int(logprobs.rank[index]))}
    top = zip(logprobs.top_ids[index, :k].tolist(), logprobs.top_logprobs[index, :k].tolist(), strict=True)
    for place, (top_id, top_logprob) in enumerate(top, 1):
        if top_id >= 0:
            entry.setdefault(top_id, Logprob(top_logprob, place))
    return entry


# Device.


def set_state(
    flags: Int32[Array, "slots V"],
    bias: Float[Array, "slots V"],
    slot: Int32[Array, ""],
    flags_row: Int32[Array, " V"],
    bias_row: Float[Array, " V"],
) -> tuple[Int32[Array, "slots V"], Float[Array, "slots V"]]:
    """`flags` and `bias` with one slot's rows replaced. Donates both."""
    return flags.at[slot].set(flags_row), bias.at[slot].set(bias_row)


def draw(
    logits: Float[Array, "R V"], last_tokens: Int32[Array, " slots"], packed: Int32[Array, " size"]
) -> tuple[Int32[Array, " slots"], Int32[Array, "R 1"]]:
    """Tokens of rows that are "greedy" or "draw": `(last_tokens with them, tokens)`."""
    fields, _ = _unpack(packed, logits.shape[0])
    tokens = _choose(logits, fields)
    return last_tokens.at[fields["slot"]].set(tokens), tokens[:, None]


def draw_full(
    logits: Float[Array, "R V"],
    last_tokens: Int32[Array, " slots"],
    flags: Int32[Array, "slots V"],
    bias: Float[Array, "slots V"],
    packed: Int32[Array, " size"],
) -> tuple[Int32[Array, " slots"], Int32[Array, "slots V"], Int32[Array, "R columns"]]:
    """Tokens of rows of any kind, and log-probabilities: `(last_tokens and flags with them, result)`.

    Donates `flags`. A result has 3 + 2 * `MAX_LOGPROBS` columns for `unpack_result`. Log-probabilities are those of
    `logits` as given. A row whose settings leave no token at all is drawn as if they masked none.
    """
    fields, pairs = _unpack(packed, logits.shape[0])
    slots, uses_state = fields["slot"], fields["options"] & _USES_STATE > 0
    processed = lax.cond(uses_state.any(), lambda: _with_state(logits, flags, bias, fields), lambda: logits)
    row, required, banned = pairs
    matches = (required == ANY_TOKEN) | (required == last_tokens.at[slots[row]].get(mode="clip"))
    processed = processed.at[jnp.where(matches, row, logits.shape[0]), banned].set(-jnp.inf)
    nothing_left = processed.max(axis=-1, keepdims=True) == -jnp.inf
    tokens = _choose(jnp.where(nothing_left, logits, processed), fields)

    wants_logprobs = fields["options"] & _LOGPROBS > 0
    columns = lax.cond(
        wants_logprobs.any(),
        lambda: jnp.where(wants_logprobs[:, None], token_logprobs(logits, tokens), 0),
        lambda: jnp.zeros((logits.shape[0], 2 + 2 * MAX_LOGPROBS), jnp.int32),
    )
    return (
        last_tokens.at[slots].set(tokens),
        flags.at[slots, tokens].add(jnp.where(uses_state, _ONE_OUTPUT, 0)),
        jnp.concatenate([tokens[:, None], columns], axis=1),
    )


def token_logprobs(logits: Float[Array, "N V"], targets: Int32[Array, " N"]) -> Int32[Array, "N columns"]:
    """Log-probability and rank of each target and the likeliest tokens: 2 + 2 * `MAX_LOGPROBS` columns of bits.

    For `unpack_logprobs`. For a prompt, `targets` are the tokens that come next.
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=1)
    rank = (logprobs >= chosen).sum(axis=-1, keepdims=True, dtype=jnp.int32)
    top = min(MAX_LOGPROBS, logits.shape[1])
    top_logprobs, top_ids = lax.top_k(logprobs, top)
    padding = ((0, 0), (0, MAX_LOGPROBS - top))
    top_ids = jnp.pad(top_ids.astype(jnp.int32), padding, constant_values=-1)
    top_logprobs = jnp.pad(top_logprobs, padding, constant_values=-jnp.inf)
    bits = lax.bitcast_convert_type(jnp.concatenate([chosen, top_logprobs], axis=1), jnp.int32)
    return jnp.concatenate([bits[:, :1], rank, top_ids, bits[:, 1:]], axis=1)


def _unpack(packed: Int32[Array, " size"], num_rows: int) -> tuple[dict[str, jax.Array], Int32[Array, "3 pairs"]]:
    """Fields `[R]` by name, and the pairs: their rows, required last tokens and banned tokens."""
    size = len(_FIELDS) * num_rows
    fields: dict[str, jax.Array] = dict(zip(_FIELDS, packed[:size].reshape(len(_FIELDS), num_rows), strict=True))
    fields |= {name: lax.bitcast_convert_type(fields[name], jnp.float32) for name in _FLOATS}
    return fields, packed[size:].reshape(3, -1)


def _with_state(
    logits: Float[Array, "R V"],
    flags: Int32[Array, "slots V"],
    bias: Float[Array, "slots V"],
    fields: dict[str, jax.Array],
) -> Float[Array, "R V"]:
    """Logits with masks, biases and penalties of the rows that use state."""

    def column(name: str) -> jax.Array:
        return fields[name][:, None]

    row_flags = flags.at[fields["slot"]].get(mode="clip")
    processed = logits + bias.at[fields["slot"]].get(mode="clip")
    held_back = (column("options") & _BELOW_MIN_TOKENS > 0) & (row_flags & _STOPS > 0)
    processed = jnp.where(held_back, -jnp.inf, processed)
    count = row_flags // _ONE_OUTPUT
    seen = (row_flags & _IN_PROMPT > 0) | (count > 0)
    repetition = jnp.where(seen, column("repetition_penalty"), 1)
    processed = jnp.where(processed > 0, processed / repetition, processed * repetition)
    processed -= column("frequency_penalty") * count.astype(jnp.float32)
    processed -= column("presence_penalty") * (count > 0)
    # A tiny repetition penalty must not take logits to infinity, all alike.
    processed = jnp.minimum(processed, jnp.finfo(jnp.float32).max)
    return jnp.where(column("options") & _USES_STATE > 0, processed, logits)


def _choose(logits: Float[Array, "R V"], fields: dict[str, jax.Array]) -> Int32[Array, " R"]:
    """The likeliest token where temperature is 0, the lowest id of equals, else one that is drawn."""
    likeliest = _argmax(logits)
    draws = fields["temperature"] > 0
    return lax.cond(draws.any(), lambda: jnp.where(draws, _draw(logits, fields), likeliest), lambda: likeliest)


def _draw(logits: Float[Array, "R V"], fields: dict[str, jax.Array]) -> Int32[Array, " R"]:
    """A token of each row, by the Gumbel-max trick.

    Top-p needs no sort: if the best score of all tokens belongs to one within the top p, it is the best of these.
    If not, nothing as unlikely as that token is within, and the best of the likelier ones is tried. The first try
    succeeds with a probability of at least p; the expected number of tries grows with log(V) at worst.
    """
    # Less the peak, or a tiny temperature would take the likeliest tokens to infinity, all alike.
    peak = logits.max(axis=-1, keepdims=True)
    scaled = (logits - peak) / jnp.maximum(fields["temperature"], jnp.finfo(jnp.float32).tiny)[:, None]
    floor = jnp.maximum(jnp.log(fields["min_p"]), _top_k_floor(scaled, fields["top_k"]))
    kept = scaled >= floor[:, None]
    mass = jnp.where(kept, jnp.exp(scaled), 0)
    limit = fields["top_p"] * mass.sum(axis=-1)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed.astype(jnp.uint32)), position)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    scores = jnp.where(kept, scaled + jax.vmap(noise)(fields["seed"], fields["position"]), -jnp.inf)

    def attempt(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The best of the tokens likelier than the last one, for rows where that was outside; others find it again."""
        _, value, pivot, outside = state
        pivot = jnp.where(outside[:, None], value, pivot)
        tokens = _argmax(jnp.where(scaled > pivot, scores, -jnp.inf))
        value = jnp.take_along_axis(scaled, tokens[:, None], axis=1)
        likelier = jnp.where(scaled > value, mass, 0).sum(axis=-1)
        # The peak itself is always within; a row of NaN too, which no comparison could ever end.
        return tokens, value, pivot, (fields["top_p"] < 1) & (likelier >= limit) & (value[:, 0] < 0)

    rows = logits.shape[0]
    lowest = jnp.full((rows, 1), -jnp.inf)
    start = (jnp.zeros(rows, jnp.int32), lowest, lowest, jnp.ones(rows, bool))
    return lax.while_loop(lambda state: state[-1].any(), attempt, start)[0]


def _argmax(x: Float[Array, "R V"]) -> Int32[Array, " R"]:
    """The first of the largest values of each row; with NaN, some token.

    XLA:CPU does not vectorize `jnp.argmax`, which takes 2 to 3 times as long.
    """
    last = x.shape[1] - 1
    return jnp.where(x == x.max(axis=-1, keepdims=True), jnp.arange(last + 1, dtype=jnp.int32), last).min(axis=-1)


def _top_k_floor(x: Float[Array, "R V"], k: Int32[Array, " R"]) -> Float[Array, " R"]:
    """The k-th largest value of each row, -inf where k is below 1. All ways to it give the same."""
    vocab_size = x.shape[1]
    few = min(_SMALL_TOP_K, vocab_size)
    k = jnp.minimum(k, vocab_size)
    nothing = jnp.full(x.shape[0], -jnp.inf)

    def small() -> jax.Array:
        return jnp.take_along_axis(lax.top_k(x, few)[0], jnp.maximum(k - 1, 0)[:, None], axis=1)[:, 0]

    branch = jnp.where(k.max() <= 0, 0, jnp.where(k.max() <= few, 1, 2))
    found = lax.switch(branch, [lambda: nothing, small, lambda: _kth_largest(x, k)])
    return jnp.where(k > 0, found, -jnp.inf)


def _kth_largest(x: Float[Array, "R V"], k: Int32[Array, " R"]) -> Float[Array, " R"]:
    """The k-th largest value of each row, by bisection on its bits."""

    def flip(bits: jax.Array) -> jax.Array:
        """Floats' bits to integers of the same order, and back."""
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    ordered = flip(lax.bitcast_convert_type(x, jnp.int32))

    def set_bit(index: jax.Array, found: jax.Array) -> jax.Array:
        higher = found + (1 << (31 - index))
        return jnp.where((ordered >= higher[:, None]).sum(axis=-1) >= k, higher, found)

    found = lax.fori_loop(0, 32, set_bit, jnp.full(x.shape[0], -(2**31), jnp.int32))
    return lax.bitcast_convert_type(flip(found), jnp.float32)
