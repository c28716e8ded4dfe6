"""Host side of sampling: settings of each sequence, inputs for the sampler on the device, and its results."""

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
"""Slot of rows that record no token: padding, and chunks of a prompt before its last chunk."""
ANY_TOKEN = -1
"""First token of a banned pair (`Pairs`) that matches every token."""
NO_TOKEN = -1
"""Token of rows whose largest logit is not finite."""
NO_ALLOWED_TOKEN = -2
"""Token of constrained rows if their masks, biases and bad words together leave no token."""

# Bits of a row's `options`.
USES_STATE, BELOW_MIN_TOKENS, LOGPROBS, CONSTRAINED = 1, 2, 4, 8
# Bits of a token's entry in `flags`. The bits from `ONE_OUTPUT` up count how often the token was generated.
IN_PROMPT, STOPS, ONE_OUTPUT = 1, 2, 4

FLOATS: tuple[str, ...] = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
# Fields of a row, in packed order. From `options` on they are constant for a sequence, except `BELOW_MIN_TOKENS`.
FIELDS: tuple[str, ...] = ("slot", "position", "num_pairs", "options", "seed", "top_k", *FLOATS)
_OPTIONS = FIELDS.index("options")

MAX_BAD_WORD_PAIRS = 256
"""Number of banned pairs of each row of `sample_full`. Also the limit of a request's bad words with several tokens.

The number is fixed, so that one program serves all requests. A smaller number would save no time on CPU. A step sends
2 KiB of pairs per row.
"""

# Text before a word while it is encoded. No vocabulary has a token with a newline and a letter.
_BEFORE = "\n"

BadWords = tuple[tuple[int, ...], ...]
Pairs = Int32[np.ndarray, "2 pairs"]
"""Banned pairs of tokens: if the last token is `[0, i]`, the next token must not be `[1, i]`."""
Endings = Mapping[int, Sequence[tuple[tuple[int, ...], tuple[int, int]]]]
"""Bad words of at least three tokens, by their third token from the end.

Each word is a pair of tuples: all tokens but the last two, and the last two tokens.
"""

_NO_PAIRS = np.zeros((2, 0), np.int32)


SamplerKind = Literal["greedy", "sample", "full"]
Masks = Int32[np.ndarray, "R words"]
"""Allowed tokens of the rows of a step, packed: bit `i` of word `w` is token `32 * w + i`.

Rows without a constraint ignore their masks.
"""


@dataclass(frozen=True, eq=False)
class SamplingRow:
    """Sampling settings of one sequence, in the form that the sampler needs. Made by `sampling_row`.

    Attributes:
        params: settings of the request.
        vocab_size: number of tokens with logits.
        kind: cheapest sufficient sampler: "greedy" (argmax), "sample" (program `sample`) or "full" (program
            `sample_full`).
        uses_state: whether the sequence uses the arrays `flags` and `bias` on the device (see `state_rows`).
        stop_ids: `stop_token_ids` of the request.
        held_back: stop tokens and end-of-sequence tokens. They are banned for the first `min_tokens` tokens.
        banned: bad words with only one token, as token ids.
        bad_words: bad words of two or more tokens, at most `MAX_BAD_WORD_PAIRS`.
        two_tokens: bad words of exactly two tokens, as `Pairs`.
        endings: bad words of three or more tokens, as `Endings`.
        settings: i32 values of the fields in `FIELDS`, starting with `options`. A float is stored as its bits.
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
        """Return a copy of this row with another seed, in [0, 2**32)."""
        settings = self.settings.copy()
        settings[FIELDS.index("seed") - _OPTIONS] = _bits(seed)
        return replace(self, settings=settings)


class StepRow(NamedTuple):
    """One sequence in one step, as input of `pack`.

    Attributes:
        row: settings of the sequence.
        slot: index of the sequence in the sampler's arrays on the device. `NO_SLOT`: the token is not recorded.
        position: index of the token to choose, from the start of the sequence. The random key depends on this index.
        generated: number of tokens generated so far, including tokens that the host has not read yet.
        pairs: bad words that the token may complete, from `bad_word_pairs`.
    """

    row: SamplingRow
    slot: int
    position: int
    generated: int
    pairs: Pairs = _NO_PAIRS


class TokenLogprobs(NamedTuple):
    """Log-probability of one token at each position, and of the most probable tokens at this position.

    Attributes:
        logprob: log-probability of the token.
        rank: number of tokens that are at least as probable as the token, including itself. 1: the most probable token.
        top_ids: the `MAX_LOGPROBS` most probable tokens, in descending order. If the vocabulary has fewer tokens, the
            rest are -1.
        top_logprobs: log-probabilities of the tokens in `top_ids`. -inf if the token is -1.
    """

    logprob: Float[np.ndarray, " positions"]
    rank: Int32[np.ndarray, " positions"]
    top_ids: Int32[np.ndarray, "positions top"]
    top_logprobs: Float[np.ndarray, "positions top"]


class SamplingResult(NamedTuple):
    """Chosen tokens of a step, and their log-probabilities.

    `logprobs` is None if the program `sample` ran. After `sample_full`, the values are 0 in rows of sequences that
    requested no log-probabilities.
    """

    tokens: Int32[np.ndarray, " R"]
    logprobs: TokenLogprobs | None


# Once for each sequence


def sampling_row(
    params: SamplingParams, seed: int, vocab_size: int, eos_token_ids: Iterable[int], bad_words: BadWords = ()
) -> SamplingRow:
    """Return the sampling settings of a sequence. Sequences of one request differ only in their seeds (`with_seed`).

    End-of-sequence tokens are banned for the first `min_tokens` tokens, even if `ignore_eos` is set. vLLM does the
    same.

    Args:
        params: settings of the request.
        seed: seed of the sequence, in [0, 2**32).
        vocab_size: number of tokens with logits. Larger token ids in `bad_words` and `eos_token_ids` are ignored. The
            model cannot generate them.
        eos_token_ids: end-of-sequence tokens.
        bad_words: token ids of bad words, from `bad_word_ids`.

    Raises:
        RequestError: more than `MAX_BAD_WORD_PAIRS` bad words have several tokens, or the settings together allow no
            token.
    """
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    # A word that is longer than the output cannot be generated.
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
    constrained = params.structured is not None
    if uses_state or longer or wants_logprobs or constrained:
        kind = "full"
    else:
        kind = "sample" if params.temperature > 0 else "greedy"
    # Greedy sampling ignores filters. Neutral values save time on the device.
    top_k, top_p, min_p = (params.top_k, params.top_p, params.min_p) if params.temperature > 0 else (0, 1, 0)
    options = USES_STATE * uses_state | LOGPROBS * wants_logprobs | CONSTRAINED * constrained
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
    """Raise `RequestError` if the settings together allow no token. Bad words of several tokens are not considered."""
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
    """Return a seed in [0, 2**32) for one sample of a request without a seed. `index` is the index of the sample.

    The seed is a hash of the arguments. Two samples have the same seed only with probability 2**-32.
    """
    numbers = struct.pack("<3Q", engine_seed % 2**64, request_number, index)
    return int.from_bytes(hashlib.blake2b(numbers, digest_size=4).digest(), "little")


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> BadWords:
    """Return the token ids of each word in two forms, without and with a leading space. Equal forms are returned once.

    vLLM bans the form with a space only if the two forms have equally many tokens. This function always returns both.

    SentencePiece vocabularies add a space at the start of a text. To avoid this space, each form is encoded after a
    newline, and the tokens of the newline are cut off.

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
    """Return `(flags, bias)`, the sampler's state of a sequence that has generated `output`. `set_state` stores both.

    For each token of the vocabulary, bit 0 of `flags` says whether the token is in the prompt, and bit 1 whether it is
    a stop token. The bits from 2 on count how often the token was generated. `bias` is added to the logits, and is -inf
    for banned tokens.
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


# In every step


def bad_word_pairs(row: SamplingRow, output_known: Sequence[int], in_flight: bool) -> Pairs:
    """Return the bad words that the next token may complete. Each word is returned as the pair of its last two tokens.

    For example, the next token `d` completes the word `a b c d` if the sequence ends with `a b c`. There are two cases:

    - The host knows all tokens. If they end with `a b c`, the result has the pair `(ANY_TOKEN, d)`.
    - The host does not know the last token (`in_flight`). If the known tokens end with `a b`, the result has the pair
      `(c, d)`. The device then compares `c` with the last token.

    Args:
        row: settings of the sequence.
        output_known: generated tokens that the host has read.
        in_flight: whether the device has sampled one more token that the host has not read.
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
    start = end - len(wanted)
    return start >= 0 and tuple(tokens[start:end]) == wanted


def packed_size(num_rows: int, *, full: bool = False) -> int:
    """Return the length of the array that `pack` returns for the same `num_rows` and `full`."""
    return (len(FIELDS) + full * 2 * MAX_BAD_WORD_PAIRS) * num_rows


def pack(rows: Sequence[StepRow], num_rows: int, *, full: bool = False) -> Int32[np.ndarray, " size"]:
    """Pack the sampler's inputs for a step into one i32 array.

    The array has the fields (`FIELDS`) one after another, each field for all rows. Floats are stored as their bits. If
    fewer than `num_rows` rows are given, padding follows. The tokens of padding are not recorded.

    If `full` is true, banned pairs of tokens follow the fields, `[2, num_rows, MAX_BAD_WORD_PAIRS]`. The field
    `num_pairs` says how many pairs of a row are used.
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


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in the packed token mask of a row."""
    return -(-vocab_size // 32)


def unpack_result(result: Int32[np.ndarray, "R columns"]) -> SamplingResult:
    """Unpack the array that `sample` or `sample_full` returned, on the host."""
    return SamplingResult(result[:, 0], unpack_logprobs(result[:, 1:]) if result.shape[1] > 1 else None)


def unpack_logprobs(packed: Int32[np.ndarray, "positions columns"]) -> TokenLogprobs:
    """Unpack the array that `token_logprobs` returned, on the host."""
    floats = packed.view(np.float32)
    top = slice(2, 2 + MAX_LOGPROBS)
    return TokenLogprobs(floats[:, 0], packed[:, 1], packed[:, top], floats[:, top.stop :])


def logprob_entry(logprobs: TokenLogprobs, index: int, token: int, k: int) -> dict[int, Logprob]:
    """Return the log-probabilities of `token` and of the `k` most probable tokens at one position, by token id.

    Args:
        logprobs: log-probabilities of all positions.
        index: index of the position in `logprobs`.
        token: token at this position.
        k: number of most probable tokens, at most `MAX_LOGPROBS`.
    """
    entry = {token: Logprob(float(logprobs.logprob[index]), int(logprobs.rank[index]))}
    top = zip(logprobs.top_ids[index, :k].tolist(), logprobs.top_logprobs[index, :k].tolist(), strict=True)
    for place, (top_id, top_logprob) in enumerate(top, 1):
        if top_id >= 0:
            entry.setdefault(top_id, Logprob(top_logprob, place))
    return entry
