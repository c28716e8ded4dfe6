"""Sampling on the host: a sequence's settings, a step's inputs for `engine/sampler.py`, and its results."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import Logprob
from amoeba_jax.sampling_params import MAX_LOGPROBS, SamplingParams
from amoeba_jax.tokenizer import Tokenizer

NO_SLOT = 2**31 - 1
"""Slot of a row whose token is not recorded: padding, or a chunk that does not end its prompt."""
ANY_TOKEN = -1
"""In a pair of a bad word: its last token is banned whatever came before."""
NO_TOKEN = -1
"""In place of a token that was sampled: the largest of the row's logits is not finite."""

# Of a row's `options`.
USES_STATE, BELOW_MIN_TOKENS, LOGPROBS = 1, 2, 4
# Of a token's entry in `flags`; the bits above count how often it was generated.
IN_PROMPT, STOPS, ONE_OUTPUT = 1, 2, 4

FLOATS: tuple[str, ...] = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
# Of a row, as they are packed. From `options` on they are a sequence's own, but for `BELOW_MIN_TOKENS`.
FIELDS: tuple[str, ...] = ("slot", "position", "options", "seed", "top_k", *FLOATS)
_OPTIONS = FIELDS.index("options")

# Enough for the bad words of most steps: each size is one more program for every number of rows.
_SMALLEST_PAIR_BUCKET = 64

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
    """A step's tokens, `NO_TOKEN` for rows whose logits are not numbers. `logprobs` is None after `draw`; after
    `draw_full` it has zeros for rows that want none."""

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
    options = USES_STATE * uses_state | LOGPROBS * wants_logprobs
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
    np.add.at(flags, np.asarray(output, np.int64), ONE_OUTPUT)
    flags[np.asarray(prompt, np.int64)] |= IN_PROMPT
    flags[list(row.stop_token_ids)] |= STOPS
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
    """Size that this many pairs are padded to: a power of two of at least 64."""
    return max(_SMALLEST_PAIR_BUCKET, 1 << (num_pairs - 1).bit_length())


def pack(rows: Sequence[StepRow], num_rows: int, num_pairs: int = 0) -> Int32[np.ndarray, " size"]:
    """A step's settings as one array of integers: all rows' slots, all their positions and so on, then pairs.

    Floats travel as their bits. Rows beyond those given are padding: they take the likeliest token and record
    nothing. `num_pairs` is what the program is compiled for, at least the pairs of all rows together.
    """
    size = len(FIELDS) * num_rows
    packed = np.zeros(size + 3 * num_pairs, np.int32)
    fields = packed[:size].reshape(len(FIELDS), num_rows)
    pairs = packed[size:].reshape(3, num_pairs)
    fields[0] = NO_SLOT
    pairs[0] = num_rows  # out of range: bans nothing
    filled = 0
    for index, (row, slot, position, generated, row_pairs) in enumerate(rows):
        fields[:, index] = slot, position, *row.settings
        fields[_OPTIONS, index] |= BELOW_MIN_TOKENS * (generated < row.params.min_tokens)
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
