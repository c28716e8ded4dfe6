"""Sampling on the host: a sequence's settings, a step's inputs for `sampling/sampler.py`, and its results."""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from amoeba_jax.errors import RequestError
from amoeba_jax.outputs import Logprob
from amoeba_jax.sampling_params import MAX_LOGPROBS, SamplingParams
from amoeba_jax.shorten import shorten
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
FIELDS: tuple[str, ...] = ("slot", "position", "num_pairs", "options", "seed", "top_k", *FLOATS)
_OPTIONS = FIELDS.index("options")

MAX_BAD_WORD_PAIRS = 256
"""Pairs of bad words that `sample_full` takes for each row, and so the most bad words of several tokens of a request.

Fixed, so that there is one program for a number of rows: a request that is admitted never needs another one. With 32
rows of SmolLM2 on CPU, where a greedy sample with bad words takes 2.3 ms, room for 256 pairs costs no more than for 64;
room for 1024 costs 0.2 ms more. A step sends 2 KiB for each row.
"""

# No vocabulary has tokens of a newline and a letter.
_BEFORE = "\n"

BadWords = tuple[tuple[int, ...], ...]
Pairs = Int32[np.ndarray, "2 pairs"]
"""Last tokens, and the tokens banned after them."""
Endings = Mapping[int, Sequence[tuple[tuple[int, ...], tuple[int, int]]]]
"""Bad words of three tokens or more, by the third last: `(all but the last two, pair of the last two)`."""

_NO_PAIRS = np.zeros((2, 0), np.int32)


SamplerKind = Literal["greedy", "sample", "full"]


@dataclass(frozen=True, eq=False)
class SamplingRow:
    """What sampling needs to know of one sequence, made once by `sampling_row`.

    Attributes:
        kind: "greedy" takes the argmax and wants nothing else, "sample" wants `sample`, "full" `sample_full`.
        uses_state: reads and counts in its slot's rows of `flags` and `bias`.
        stop_ids: the client's `stop_token_ids`.
        held_back: what cannot come before `min_tokens`.
        banned: bad words of one token.
        bad_words: bad words of several tokens, at most `MAX_BAD_WORD_PAIRS`.
        two_tokens: those of them that have two, as pairs.
        endings: the longer ones.
        settings: its part of a packed step, from `options` on.
    """

    params: SamplingParams
    vocab_size: int
    kind: SamplerKind
    uses_state: bool
    stop_ids: frozenset[int]
    held_back: tuple[int, ...]
    banned: tuple[int, ...]
    bad_words: BadWords
    two_tokens: Pairs
    endings: Endings
    settings: Int32[np.ndarray, " fields"]

    def with_seed(self, seed: int) -> "SamplingRow":
        """Return this row with another seed, in [0, 2**32)."""
        settings = self.settings.copy()
        settings[FIELDS.index("seed") - _OPTIONS] = _bits(seed)
        return replace(self, settings=settings)


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
    pairs: Pairs = _NO_PAIRS


class TokenLogprobs(NamedTuple):
    """Log-probabilities of tokens and of the most probable ones in their places.

    Where the vocabulary has fewer than `MAX_LOGPROBS` tokens, the rest of the top is id -1 and -inf.
    """

    logprob: Float[np.ndarray, " N"]
    rank: Int32[np.ndarray, " N"]
    """Tokens at least as likely: 1 is the most probable."""
    top_ids: Int32[np.ndarray, "N top"]
    top_logprobs: Float[np.ndarray, "N top"]


class SamplingResult(NamedTuple):
    """A step's tokens, `NO_TOKEN` for rows whose logits are not numbers. `logprobs` is None after `sample`; after
    `sample_full` it has zeros for rows that want none."""

    tokens: Int32[np.ndarray, " R"]
    logprobs: TokenLogprobs | None


# Host, once for a sequence.


def sampling_row(
    params: SamplingParams, seed: int, vocab_size: int, eos_token_ids: Iterable[int], bad_words: BadWords = ()
) -> SamplingRow:
    """Return the device's view of one sequence's settings. Sequences of one request differ by `with_seed` alone.

    `min_tokens` holds back end-of-sequence tokens with `ignore_eos` too, as in vLLM: they would end nothing, but a
    text that goes on after one is not what `min_tokens` asks for.

    Args:
        seed: in [0, 2**32).
        vocab_size: tokens that the model has logits for. A tokenizer can have more: bad words with such tokens never
            come, and neither do ends of generation, so these are left out.
        bad_words: token ids, from `bad_word_ids`.

    Raises:
        RequestError: for more than `MAX_BAD_WORD_PAIRS` bad words of several tokens, and for settings that together
            leave no token.
    """
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    # A word of more tokens than the output can have never comes either.
    words = [word for word in dict.fromkeys(bad_words) if len(word) <= params.max_tokens and max(word) < vocab_size]
    banned = tuple(word[0] for word in words if len(word) == 1)
    longer = tuple(word for word in words if len(word) > 1)
    if len(longer) > MAX_BAD_WORD_PAIRS:
        raise RequestError(
            f"bad_words have {len(longer)} forms of several tokens, over the limit of {MAX_BAD_WORD_PAIRS}: "
            "a word counts as it is, and again after a space where its tokens differ; send fewer"
        )
    endings: dict[int, list[tuple[tuple[int, ...], tuple[int, int]]]] = {}
    for word in longer:
        if len(word) > 2:
            endings.setdefault(word[-3], []).append((word[:-2], (word[-2], word[-1])))
    masked = params.logit_bias or params.allowed_token_ids is not None or banned or params.min_tokens > 0
    uses_state = bool(masked) or penalties != (1, 0, 0)
    wants_logprobs = params.logprobs is not None
    if uses_state or longer or wants_logprobs:
        kind = "full"
    else:
        kind = "sample" if params.temperature > 0 else "greedy"
    # Filters mean nothing where the greedy token is taken: without them the device has less to do.
    top_k, top_p, min_p = (params.top_k, params.top_p, params.min_p) if params.temperature > 0 else (0, 1, 0)
    options = USES_STATE * uses_state | LOGPROBS * wants_logprobs
    integers = np.array([options, _bits(seed), top_k], np.int32)
    floats = np.array([params.temperature, top_p, min_p, *penalties], np.float32)
    stops = {*params.stop_token_ids, *eos_token_ids}
    held_back = tuple(sorted(token for token in stops if 0 <= token < vocab_size))
    _check_masks(params, vocab_size, banned, held_back)
    return SamplingRow(
        params=params,
        vocab_size=vocab_size,
        kind=kind,
        uses_state=uses_state,
        stop_ids=frozenset(params.stop_token_ids),
        held_back=held_back,
        banned=banned,
        bad_words=longer,
        two_tokens=_as_pairs([word for word in longer if len(word) == 2]),
        endings=endings,
        settings=np.concatenate([integers, floats.view(np.int32)]),
    )


def _check_masks(params: SamplingParams, vocab_size: int, banned: tuple[int, ...], held_back: tuple[int, ...]) -> None:
    """Raise `RequestError` where no token is left. A bad word of several tokens may still ban the last one later."""
    if params.allowed_token_ids is None and len(banned) + len(held_back) < vocab_size:
        return
    allowed = set(range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids)
    named = "" if params.allowed_token_ids is None else f"allowed_token_ids={shorten(params.allowed_token_ids)} and "
    left = allowed.difference(banned)
    if not left:
        raise RequestError(f"{named}bad_words leave no token to generate")
    if params.min_tokens > 0 and left.issubset(held_back):
        raise RequestError(
            f"{named}min_tokens={params.min_tokens} leave no token to generate: stop tokens and end-of-sequence tokens "
            f"cannot come before min_tokens others{', nor can bad_words' if banned else ''}"
        )


def _bits(seed: int) -> np.int32:
    return np.uint32(seed).view(np.int32)


def _as_pairs(pairs: Sequence[tuple[int, ...]]) -> Pairs:
    return np.array(pairs, np.int32).reshape(-1, 2).T


def sample_seed(engine_seed: int, request_number: int, index: int) -> int:
    """Return the seed, in [0, 2**32), of sample `index` of a request that sets none.

    A hash, so that samples of different requests share no seed but by chance: 2**-32 for any two.
    """
    numbers = struct.pack("<3Q", engine_seed % 2**64, request_number, index)
    return int.from_bytes(hashlib.blake2b(numbers, digest_size=4).digest(), "little")


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> BadWords:
    """Return the token ids of each word inside a text, without and with a space before it, each form once.

    Both are encoded behind a newline, whose tokens are cut off: at the start of a text SentencePiece vocabularies put a
    space of their own before a word. vLLM leaves out the form after a space if it has another length; here both are
    banned.

    Raises `RequestError` for a word that has no tokens, or that the tokenizer cannot encode.
    """
    stripped = list(dict.fromkeys(word.lstrip() for word in words))
    texts = [text for word in stripped for text in (word, " " + word)]
    encoded = tokenizer.encode_all([_BEFORE, *(_BEFORE + text for text in texts), *texts], add_special_tokens=False)
    before, inside, alone = encoded[0], encoded[1 : len(texts) + 1], encoded[len(texts) + 1 :]
    forms: dict[tuple[int, ...], None] = {}
    for index, (ids, ids_alone) in enumerate(zip(inside, alone, strict=True)):
        separate = ids[: len(before)] == before and len(ids) > len(before)
        form = tuple(ids[len(before) :] if separate else ids_alone)
        if not form:
            raise RequestError(
                f"bad_words must have words that the tokenizer knows, got {shorten(stripped[index // 2])}"
            )
        forms[form] = None
    return tuple(forms)


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
    flags[list(row.held_back)] |= STOPS
    allowed = row.params.allowed_token_ids
    bias = np.full(row.vocab_size, 0 if allowed is None else -np.inf, np.float32)
    bias[list(allowed or ())] = 0
    for token, value in dict(row.params.logit_bias).items():
        bias[token] += value
    bias[list(row.banned)] = -np.inf
    return flags, bias


# Host, in every step.


def bad_word_pairs(row: SamplingRow, output_known: Sequence[int], in_flight: bool) -> Pairs:
    """Return what a row's next token must not be, each with the token that must come before it for this to hold.

    Words of two tokens are there always. The work is for the longer ones: each is compared only where its third last
    token has just come.

    Args:
        output_known: generated tokens that the host has read. A word's beginning counts only if all of it is here.
        in_flight: one more token was sampled and is on the device alone. Without one the host decides by itself,
            and says `ANY_TOKEN` for the last token.
    """
    end = len(output_known) if in_flight else len(output_known) - 1
    if not row.bad_words or end < 0:
        return _NO_PAIRS
    pairs = row.two_tokens
    candidates = row.endings.get(output_known[end - 1], ()) if end else ()
    begun = [pair for start, pair in candidates if _ends_with(output_known, end, start)]
    if begun:
        pairs = np.concatenate([pairs, _as_pairs(begun)], axis=1)
    if in_flight:
        return pairs
    banned = pairs[1, pairs[0] == output_known[end]]
    return np.stack([np.full_like(banned, ANY_TOKEN), banned])


def _ends_with(tokens: Sequence[int], end: int, wanted: tuple[int, ...]) -> bool:
    """Whether `tokens[:end]` ends with `wanted`."""
    start = end - len(wanted)
    return start >= 0 and tuple(tokens[start:end]) == wanted


def packed_size(num_rows: int, *, full: bool = False) -> int:
    """How many integers `pack` returns."""
    return (len(FIELDS) + full * 2 * MAX_BAD_WORD_PAIRS) * num_rows


def pack(rows: Sequence[StepRow], num_rows: int, *, full: bool = False) -> Int32[np.ndarray, " size"]:
    """Return a step's settings as one array of integers: all rows' slots, all their positions and so on, then pairs.

    Floats travel as their bits. Rows beyond those given are padding: they take the greedy token and record
    nothing. Pairs, `[2, num_rows, MAX_BAD_WORD_PAIRS]`, are there for `sample_full` alone, if `full`; those beyond a
    row's `num_pairs` mean nothing.
    """
    size = len(FIELDS) * num_rows
    packed = np.zeros(packed_size(num_rows, full=full), np.int32)
    fields = packed[:size].reshape(len(FIELDS), num_rows)
    fields[0] = NO_SLOT
    if rows:
        used = fields[:, : len(rows)]
        below = [generated < row.params.min_tokens for row, _, _, generated, _ in rows]
        used[:_OPTIONS] = np.array([(slot, position, pairs.shape[1]) for _, slot, position, _, pairs in rows]).T
        used[_OPTIONS:] = np.stack([row.row.settings for row in rows], axis=1)
        used[_OPTIONS] |= BELOW_MIN_TOKENS * np.array(below)
    if full:
        all_pairs = packed[size:].reshape(2, num_rows, MAX_BAD_WORD_PAIRS)
        for index, row in enumerate(rows):
            if num_pairs := row.pairs.shape[1]:
                all_pairs[:, index, :num_pairs] = row.pairs
    return packed


def unpack_result(result: Int32[np.ndarray, "R columns"]) -> SamplingResult:
    """What `sample` or `sample_full` returned, once on the host."""
    return SamplingResult(result[:, 0], unpack_logprobs(result[:, 1:]) if result.shape[1] > 1 else None)


def unpack_logprobs(packed: Int32[np.ndarray, "N columns"]) -> TokenLogprobs:
    """What `token_logprobs` returned, once on the host."""
    floats = packed.view(np.float32)
    top = slice(2, 2 + MAX_LOGPROBS)
    return TokenLogprobs(floats[:, 0], packed[:, 1], packed[:, top], floats[:, top.stop :])


def logprob_entry(logprobs: TokenLogprobs, index: int, token: int, k: int) -> dict[int, Logprob]:
    """What a request gets for `token`, which is number `index` of `logprobs`: itself, then the `k` most probable."""
    entry = {token: Logprob(float(logprobs.logprob[index]), int(logprobs.rank[index]))}
    top = zip(logprobs.top_ids[index, :k].tolist(), logprobs.top_logprobs[index, :k].tolist(), strict=True)
    for place, (top_id, top_logprob) in enumerate(top, 1):
        if top_id >= 0:
            entry.setdefault(top_id, Logprob(top_logprob, place))
    return entry
