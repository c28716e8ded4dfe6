"""Sequences before their next token, the sampler as an instance drives it, and a reference in float64 NumPy.

Logits are `[R, V]` here, one row for each sequence. The sampler gets them as `[V, R]`. Programs take longer to compile
than to run, so tests share a few shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from amoeba_jax import SamplingParams
from amoeba_jax.cpu_cache import few_kernels
from amoeba_jax.sampling.rows import (
    NO_SLOT,
    SamplingResult,
    SamplingRow,
    StepRow,
    TokenLogprobs,
    bad_word_pairs,
    mask_words,
    pack,
    sampling_row,
    state_rows,
    unpack_logprobs,
    unpack_result,
)
from amoeba_jax.sampling.sampler import sample, sample_full, set_state, token_logprobs

OPTIONS = few_kernels("cpu")  # as for serving
jit_sample = jax.jit(sample, compiler_options=OPTIONS)
jit_draw_full = jax.jit(sample_full, donate_argnums=2, compiler_options=OPTIONS)
jit_set_state = jax.jit(set_state, donate_argnums=(0, 1))
jit_token_logprobs = jax.jit(token_logprobs)

GREEDY = SamplingParams(temperature=0)
VOCABULARY, ROWS, SLOTS = 64, 8, 10
EOS = (2, 5)


# The reference.


@cache
def gumbel(seed: int, position: int, vocab_size: int) -> np.ndarray:
    key = jax.random.fold_in(jax.random.key(np.uint32(seed)), position)
    return np.asarray(jax.random.gumbel(key, (vocab_size,), jnp.float32), np.float64)


def filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return the probabilities of one row: apply temperature, then min-p, then top-k to the rest, then top-p.

    Raise `AssertionError` if the result depends on a rounding error.
    """
    scaled = np.asarray(logits, np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    if 0 < params.min_p < 1:
        assert np.abs(p - params.min_p).min() > 1e-5, "min-p is on the edge of a token"
    p[p < params.min_p] = 0
    if params.top_k > 0:
        kth = np.sort(p)[::-1][min(params.top_k, len(p)) - 1]
        assert not ((p != kth) & (np.abs(p - kth) <= 1e-5 * kth)).any(), "top-k is on the edge of a token"
        p[p < kth] = 0
    p /= p.sum()
    if params.top_p < 1:
        higher = np.array([p[p > value].sum() for value in p])
        assert np.abs(higher - params.top_p).min() > 1e-5, "top-p is on the edge of a token"
        p[higher >= params.top_p] = 0
    return p / p.sum()


def processed(logits: np.ndarray, case: "Case") -> np.ndarray:
    """Return the logits after masks, bias and penalties, applied one by one."""
    params, x = case.params, np.asarray(logits, np.float64).copy()
    prompt, output = list(case.prompt), list(case.output)
    for token in range(len(x)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -np.inf
    for word in case.words:
        if len(word) - 1 <= len(output) and output[len(output) - len(word) + 1 :] == list(word[:-1]):
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[[*EOS, *params.stop_token_ids]] = -np.inf
    for token, bias in dict(params.logit_bias).items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * float(params.repetition_penalty)
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return logits.astype(np.float64) if np.isneginf(x).all() else x


def expected_token(logits: np.ndarray, case: "Case") -> int:
    """Return the token of a row. Raise `AssertionError` if it depends on a rounding error."""
    x = processed(logits, case)
    scores = x
    if case.params.temperature > 0:
        kept = filtered(x, case.params) > 0
        noise = gumbel(case.seed, case.position, len(x))
        scores = np.where(kept, x / case.params.temperature + noise, -np.inf)
    best, next_best = np.sort(scores)[::-1][:2]
    assert best - next_best > 1e-4 * (1 + abs(best)), "two tokens are as good"
    return int(scores.argmax())


# Sampler, driven like by an instance.


@dataclass
class Case:
    """Sequence before its next token."""

    params: SamplingParams
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    in_flight: bool = False
    slot: int = 0

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def row(self, vocab_size: int = VOCABULARY) -> StepRow:
        row = sampling_row(self.params, self.seed, vocab_size, EOS, self.words)
        known = self.output[:-1] if self.in_flight else self.output
        pairs = bad_word_pairs(row, known, self.in_flight)
        return StepRow(row, self.slot, self.position, len(self.output), pairs)


class State:
    """Sampling state on the device. Unused slots contain garbage."""

    def __init__(self, vocab_size: int = VOCABULARY, slots: int = SLOTS):
        self.last_tokens = jnp.full(slots, 1, jnp.int32)
        self.flags = jnp.full((slots, vocab_size), 7 + 4 * 100, jnp.int32)
        self.bias = jnp.full((slots, vocab_size), jnp.nan, jnp.float32)

    def admit(self, case: Case) -> None:
        row = case.row(self.flags.shape[1]).row
        rows = state_rows(row, case.prompt, case.output)
        self.flags, self.bias = jit_set_state(self.flags, self.bias, jnp.int32(case.slot), *map(jnp.asarray, rows))
        if case.in_flight:
            self.last_tokens = self.last_tokens.at[case.slot].set(case.output[-1])

    def step(self, logits: np.ndarray, rows: list[StepRow]) -> SamplingResult:
        packed = jnp.asarray(pack(rows, len(logits), full=True))
        x = jnp.asarray(logits.T, jnp.float32)
        masks = jnp.zeros((len(logits), mask_words(self.flags.shape[1])), jnp.int32)  # no row is constrained
        inputs = self.flags, self.bias, packed, masks
        self.last_tokens, self.flags, result = jit_draw_full(x, self.last_tokens, *inputs)
        return unpack_result(np.array(result))


def sample_full(logits: np.ndarray, cases: list[Case]) -> np.ndarray:
    """Return the tokens of cases, each in the slot of its index. Logits may have more rows."""
    vocab_size = logits.shape[1]
    state = State(vocab_size, len(logits) + 2)
    for slot, case in enumerate(cases):
        case.slot = slot
        if case.row(vocab_size).row.uses_state or case.in_flight:
            state.admit(case)
    return state.step(logits, [case.row(vocab_size) for case in cases]).tokens[: len(cases)]


@cache
def cached_row(params: SamplingParams, vocab_size: int) -> SamplingRow:
    return sampling_row(params, 0, vocab_size, ())


@cache
def seeded_row(params: SamplingParams, seed: int, vocab_size: int) -> SamplingRow:
    """Return a row for a seed. `with_seed` is much faster than `sampling_row`, and some tests need 20,000 seeds."""
    return cached_row(params, vocab_size).with_seed(seed)


def sample(logits: np.ndarray, params: SamplingParams | list[SamplingParams], seeds=0, positions=0) -> np.ndarray:
    """Return the tokens that `sample` takes from `[R, V]` logits, with settings for all rows or for each row."""
    num_rows, vocab_size = logits.shape
    settings = params if isinstance(params, list) else [params] * num_rows
    seeds, positions = (np.broadcast_to(value, num_rows).tolist() for value in (seeds, positions))
    rows = [
        StepRow(seeded_row(p, seed, vocab_size), NO_SLOT, position, 0)
        for p, seed, position in zip(settings, seeds, positions, strict=True)
    ]
    x = jnp.asarray(logits.T, jnp.float32)
    _, result = jit_sample(x, jnp.zeros(SLOTS, jnp.int32), jnp.asarray(pack(rows, num_rows)))
    assert result.dtype == jnp.int32
    assert result.shape == (num_rows, 1)
    tokens, logprobs = unpack_result(np.asarray(result))
    assert logprobs is None
    return tokens


def logprobs_of(logits: np.ndarray, targets: np.ndarray) -> TokenLogprobs:
    """Return log-probabilities from `[N, V]` logits and a target for each row."""
    packed = jit_token_logprobs(jnp.asarray(logits.T), jnp.asarray(targets, jnp.int32))
    return unpack_logprobs(np.array(packed))


def random_logits(rows: int = 512, vocabulary: int = VOCABULARY, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((rows, vocabulary))).astype(np.float32)


# Distributions.


def assert_follows(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Check that exactly the possible tokens occur, with Pearson's statistic within 6 sigma."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    possible = probabilities > 0
    assert expected[possible].min() > 5, "the test draws too few"
    assert set(np.nonzero(counts)[0]) == set(np.nonzero(possible)[0])
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic <= freedom + 6 * np.sqrt(2 * freedom) + 6


DRAWS = 20000


def flat_logits(seed: int) -> np.ndarray:
    """Return logits of twelve tokens. In thousands of draws every token occurs."""
    return np.clip(np.random.default_rng(seed).standard_normal(12), -1.5, 1.5).astype(np.float32)


def draw_many(logits: np.ndarray, params: SamplingParams | list[SamplingParams], seeds=0) -> np.ndarray:
    """Draw `DRAWS` tokens from one row's logits, each at a different position."""
    return sample(np.broadcast_to(logits, (DRAWS, len(logits))), params, seeds, np.arange(DRAWS))
