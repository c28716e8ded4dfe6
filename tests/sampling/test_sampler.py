"""Drawing tokens, compared with float64 NumPy: exact distributions, and exact tokens for a seed and a position.

Seeds are fixed, so every run gives the same tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_cases import (
    DRAWS,
    GREEDY,
    ROWS,
    Case,
    assert_follows,
    draw_many,
    filtered,
    flat_logits,
    gumbel,
    random_logits,
    sample,
    sample_full,
)

from amoeba_jax import SamplingParams
from amoeba_jax.sampling.rows import NO_TOKEN
from amoeba_jax.sampling.sampler import _gumbel


@pytest.mark.parametrize("vocabulary", [1, 64, 5000])
def test_temperature_zero_takes_the_greedy_token(vocabulary: int):
    logits = random_logits(12, vocabulary)
    np.testing.assert_array_equal(sample(logits, GREEDY), logits.argmax(-1))
    # Other settings have no effect then.
    params = SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.1)
    np.testing.assert_array_equal(sample(logits, params, 7, 3), logits.argmax(-1))


def test_greedy_rows_stay_greedy_beside_drawn_ones():
    logits = random_logits()
    tokens = sample(logits, [GREEDY, SamplingParams(temperature=5.0)] * 256, np.arange(512))
    np.testing.assert_array_equal(tokens[::2], logits.argmax(-1)[::2])
    assert (tokens[1::2] != logits.argmax(-1)[1::2]).any()


def test_greedy_ties_go_to_the_first_token():
    logits = np.round(random_logits())
    np.testing.assert_array_equal(sample(logits, GREEDY), logits.argmax(-1))


@pytest.mark.parametrize("setting", [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-44}, {"min_p": 1.0}], ids=str)
def test_filters_at_their_tightest_leave_the_most_probable(setting: dict):
    logits = random_logits()
    tokens = sample(logits, SamplingParams(temperature=3.0, **setting), np.arange(512))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("setting", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.1}], ids=str)
def test_filters_keep_tokens_as_likely_as_the_last_one_kept(setting: dict):
    logits = np.array([0.0, 2.0, 1.0, 2.0, 2.0, 1.0, 0.0, 2.0, -1.0, -np.inf, 0.0, 1.0], np.float32)
    tokens = draw_many(logits, SamplingParams(**setting))
    assert_follows(tokens, (logits == 2) / 4)


@pytest.mark.parametrize("top_k", [-1, 0, 64, 1000])
def test_top_k_of_all_changes_nothing(top_k: int):
    logits, seeds = random_logits(), np.arange(512)
    tokens = sample(logits, SamplingParams(top_k=top_k), seeds)
    np.testing.assert_array_equal(tokens, sample(logits, SamplingParams(), seeds))


@pytest.mark.first_by_default
@pytest.mark.parametrize("vocabulary", [200, 2080])
def test_every_top_k_by_every_way_to_it(vocabulary: int):
    """Batches have only small values, or small and large values. Vocabularies have few or many blocks."""
    logits, seeds = random_logits(12, vocabulary, seed=3), range(12)
    larger = [1, 2, 63, 64, 65, 66, 100, 128, vocabulary - 2, vocabulary - 1, vocabulary, vocabulary + 1]
    for top_ks in ([1, 2, 3, 5, 8, 63, 64, 10, 20, 30, 40, 50], larger):
        params = [SamplingParams(top_k=k, temperature=30.0) for k in top_ks]
        tokens = sample(logits, params, list(seeds))
        for row, k in enumerate(top_ks):
            kept = logits[row] >= np.sort(logits[row])[::-1][min(k, vocabulary) - 1]
            scores = np.where(kept, logits[row].astype(np.float64) / 30 + gumbel(row, 0, vocabulary), -np.inf)
            assert tokens[row] == scores.argmax(), f"top_k={k}"


@pytest.mark.parametrize("temperature", [0.4, 2.5])
def test_tokens_follow_the_softmax_over_seeds(temperature: float):
    logits, params = flat_logits(seed=1), SamplingParams(temperature=temperature)
    tokens = sample(np.broadcast_to(logits, (DRAWS, 12)), params, np.arange(DRAWS), positions=5)
    assert_follows(tokens, filtered(logits, params))


def test_tokens_follow_the_softmax_over_the_positions_of_one_request():
    logits, params = flat_logits(seed=2) / 2, SamplingParams()
    tokens = draw_many(logits, params, seeds=1234)
    p = filtered(logits, params)
    assert_follows(tokens, p)
    # Successive tokens are independent.
    assert_follows((tokens[:-1] * 12 + tokens[1:])[::2], np.outer(p, p).ravel())


FILTERS = [
    {"top_k": 3},
    {"top_k": 9, "temperature": 0.5},
    {"top_p": 0.3},
    {"top_p": 0.75},
    {"top_p": 0.97, "temperature": 2.0},
    {"min_p": 0.2},
    {"min_p": 0.5, "temperature": 1.5},
    {"top_k": 5, "top_p": 0.8},  # 0.8 of the five, not of all
    {"top_k": 4, "top_p": 0.55, "min_p": 0.3},
    {"top_p": 0.9, "min_p": 0.25},  # 0.9 of the tokens after min-p
    {"top_k": 6, "top_p": 0.9, "min_p": 0.15, "temperature": 1.3},
]


@pytest.mark.parametrize("setting", FILTERS, ids=str)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_filtered_tokens_follow_the_filtered_distribution(setting: dict, seed: int):
    logits, params = flat_logits(seed), SamplingParams(**setting)
    assert_follows(draw_many(logits, params, seed), filtered(logits, params))


def test_filters_of_different_rows_do_not_mix():
    logits, settings = flat_logits(seed=6), [SamplingParams(**setting) for setting in FILTERS]
    tokens = draw_many(logits, [settings[row % len(settings)] for row in range(DRAWS)])
    for index, params in enumerate(settings):
        assert_follows(tokens[index :: len(settings)], filtered(logits, params))


def test_noise_is_that_of_jax_random():
    seeds, positions = np.array([0, 1, 2**31, 2**32 - 1]), np.array([0, 7, 131071, 2**31 - 1], np.int32)
    packed_seeds = jnp.asarray(seeds.astype(np.uint32).view(np.int32))
    noise = np.asarray(jax.jit(_gumbel, static_argnums=2)(packed_seeds, jnp.asarray(positions), 5000))
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        np.testing.assert_allclose(noise[:, row], gumbel(seed, position, 5000), rtol=1e-6, atol=1e-6)


def test_seed_and_position_both_matter():
    logits, rows, params = np.zeros((512, 64), np.float32), np.arange(512), SamplingParams()
    base = sample(logits, params, rows, 7)
    np.testing.assert_array_equal(base, sample(logits, params, rows, 7))
    assert (base != sample(logits, params, rows, 8)).mean() > 0.9
    assert (base != sample(logits, params, rows + 512, 7)).mean() > 0.9
    assert (base != sample(logits, params, 7, rows)).mean() > 0.9, "they are not interchangeable"


def test_all_32_bits_of_a_seed_count():
    seeds = [1, 1 + 2**16, 1 + 2**31, 2**32 - 1] * 3
    tokens = sample(np.zeros((12, 5000), np.float32), SamplingParams(), seeds)
    assert len(set(tokens.tolist())) == 4


def test_shifting_all_logits_changes_nothing():
    logits, seeds, params = np.round(4 * random_logits()) / 4, np.arange(512), SamplingParams(top_p=0.9)
    np.testing.assert_array_equal(sample(logits + 64, params, seeds), sample(logits, params, seeds))


@pytest.mark.parametrize("temperature", [1e-20, 1e-37, 1e-45, 1e-60])
def test_tiny_temperature_is_greedy(temperature: float):
    """Any temperature above 0 is allowed. Division of logits by a tiny temperature must not overflow."""
    logits = random_logits()
    tokens = sample(logits, SamplingParams(temperature=temperature, top_p=0.9), np.arange(512))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_huge_temperature_is_uniform():
    assert_follows(draw_many(flat_logits(seed=7), SamplingParams(temperature=3e38)), np.full(12, 1 / 12))


def test_impossible_tokens_never_come():
    logits = flat_logits(seed=8)
    logits[[0, 5, 11]] = -np.inf
    params = SamplingParams(temperature=1e30)
    assert_follows(draw_many(logits, params), np.isfinite(logits) / 9)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("whole_row", [False, True])
def test_broken_logits_give_no_token_and_harm_no_other_row(broken: float, whole_row: bool):
    logits = random_logits()
    whole = sample(logits, SamplingParams(top_p=0.9, top_k=20), np.arange(512))
    logits[0, :: 1 if whole_row else 9] = broken
    tokens = sample(logits, SamplingParams(top_p=0.9, top_k=20), np.arange(512))
    # One NaN among numbers may stay undetected, and -inf among numbers is valid.
    assert tokens[0] == NO_TOKEN or (broken != np.inf and not whole_row and 0 <= tokens[0] < logits.shape[1])
    np.testing.assert_array_equal(tokens[1:], whole[1:])
    case = Case(SamplingParams(repetition_penalty=1.5, logprobs=3), prompt=[1])
    full = sample_full(logits[:ROWS], [case])[0]
    assert full == NO_TOKEN or (broken != np.inf and not whole_row and 0 <= full < logits.shape[1])


@pytest.mark.first_by_default
@pytest.mark.parametrize("vocabulary", [pytest.param(64, marks=pytest.mark.slow), 5000])
def test_row_gets_the_same_token_whatever_its_batch_and_place(vocabulary: int):
    rows, random = 12, np.random.default_rng(8)
    logits = random_logits(rows, vocabulary, seed=8)
    params = [
        SamplingParams(
            temperature=random.choice([0.0, 0.7, 1.0, 2.0]),
            top_k=random.choice([0, 5, 40, 200]),
            top_p=random.choice([0.6, 0.9, 1.0]),
            min_p=random.choice([0.0, 0.05]),
        )
        for _ in range(rows)
    ]
    seeds, positions = random.integers(0, 2**32, rows), random.integers(0, 4096, rows)

    def at(index: np.ndarray) -> np.ndarray:
        return sample(logits[index], [params[i] for i in index], seeds[index], positions[index])

    whole = at(np.arange(rows))
    for row in range(rows):
        assert at(np.array([row])) == whole[row], "alone"
    for _ in range(5):
        order = random.permutation(rows)
        np.testing.assert_array_equal(at(order), whole[order])
    large = random.integers(0, rows, 512)
    np.testing.assert_array_equal(at(large), whole[large])
    # The program with all options gives the same tokens.
    cases = [
        Case(p, prompt=[0] * n, seed=s) for p, s, n in zip(params, seeds.tolist(), positions.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(sample_full(logits, cases), whole)


@pytest.mark.parametrize("lost", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("setting", [{"temperature": 0}, {}, {"top_p": 0.5}, {"top_k": 5, "min_p": 0.1}], ids=str)
def test_logits_that_are_not_numbers_give_no_token_to_their_row_alone(lost: float, setting: dict):
    logits, seeds, params = random_logits(), np.arange(512), SamplingParams(**setting)
    damaged = logits.copy()
    damaged[1::2] = lost
    tokens = sample(damaged, params, seeds)
    np.testing.assert_array_equal(tokens[::2], sample(logits, params, seeds)[::2])
    assert (tokens[1::2] == NO_TOKEN).all()


@pytest.mark.parametrize("setting", [{"temperature": 0}, {}, {"top_p": 0.5}], ids=str)
def test_one_nan_among_numbers_is_no_token_that_comes(setting: dict):
    logits = random_logits()
    logits[:, 7] = np.nan
    assert 7 not in sample(logits, SamplingParams(**setting), np.arange(512))


def test_one_infinite_logit_ends_in_no_token():
    """No token is within the top p of an infinite peak, but the search must end."""
    logits = random_logits(ROWS)
    logits[3, 9] = np.inf
    tokens = sample(logits, SamplingParams(top_p=0.5), np.arange(ROWS))
    assert (tokens == NO_TOKEN).tolist() == [row == 3 for row in range(ROWS)]


@pytest.mark.parametrize("lost", [np.nan, np.inf], ids=str)
def test_penalties_and_masks_do_not_hide_logits_that_are_not_numbers(lost: float):
    logits = random_logits(ROWS)
    settings = [
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=0, allowed_token_ids=[1, 2, 3]),
        SamplingParams(temperature=1, presence_penalty=1, logit_bias={9: -100}),
        SamplingParams(temperature=0, logprobs=2),
    ]
    damaged = logits.copy()
    damaged[:4, slice(9, 10) if lost == np.inf else slice(None)] = lost
    cases = [Case(params, (1, 2), (3,)) for params in settings * 2]
    tokens = sample_full(damaged, cases)
    assert (tokens[:4] == NO_TOKEN).all()
    np.testing.assert_array_equal(tokens[4:], sample_full(logits, cases)[4:])
