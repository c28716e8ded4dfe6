"""Sampling against exact distributions in float64 NumPy. Seeds are fixed: nothing is left to chance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from amoeba_jax.engine.sampler import pack_sampling, sample, sample_packed
from amoeba_jax.sampling_params import SamplingParams

sampler = jax.jit(sample)


def draw(logits: np.ndarray, seeds=0, positions=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Sample rows of `[R, V]` logits; settings are one for all rows or one each."""
    rows = len(logits)

    def field(value, dtype) -> jax.Array:
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), rows))

    out = sampler(
        jnp.asarray(logits, jnp.float32),
        field(temperature, np.float32),
        field(top_k, np.int32),
        field(top_p, np.float32),
        field(min_p, np.float32),
        field(seeds, np.int32),
        field(positions, np.int32),
    )
    assert out.dtype == jnp.int32
    return np.asarray(out)


def exact(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Probabilities of one row's tokens: temperature, then top-k, then top-p of the rest, then min-p.

    Raises if the outcome hangs on a rounding error.
    """
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    if top_k > 0:
        kth = np.sort(p)[::-1][min(top_k, len(p)) - 1]
        p[p < kth] = 0
    p /= p.sum()
    kept, mass = np.zeros(len(p), bool), 0.0
    for token in np.argsort(-p):
        if top_p < 1:
            assert abs(mass - top_p) > 1e-5, "top-p is on the edge of a token"
        if mass < top_p:
            kept[token] = True
        mass += p[token]
    assert np.abs(p - min_p * p.max()).min() > 1e-6 or min_p in (0, 1), "min-p is on the edge of a token"
    kept &= p >= min_p * p.max()
    p = np.where(kept, p, 0)
    return p / p.sum()


def assert_follows(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Exactly the possible tokens occur, as often as they should: Pearson's statistic within 6 sigma."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    possible = probabilities > 0
    assert expected[possible].min() > 5, "the test draws too few"
    assert set(np.nonzero(counts)[0]) == set(np.nonzero(possible)[0])
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic <= freedom + 6 * np.sqrt(2 * freedom) + 6


def random_logits(rows: int = 512, vocabulary: int = 64, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((rows, vocabulary))).astype(np.float32)


# Compiling the sort takes far longer than running it, so tests share a few shapes: 512 rows of 64 tokens, and
# for distributions this many draws from one row of 12.
DRAWS = 20000


def flat_logits(seed: int) -> np.ndarray:
    """Twelve tokens of which none is too rare to turn up in thousands of draws."""
    return np.clip(np.random.default_rng(seed).standard_normal(12), -1.5, 1.5).astype(np.float32)


def draw_many(logits: np.ndarray, **settings) -> np.ndarray:
    """`DRAWS` tokens of one row."""
    return draw(np.broadcast_to(logits, (DRAWS, len(logits))), **({"seeds": np.arange(DRAWS)} | settings))


@pytest.mark.parametrize("vocabulary", [1, 64, 5000])
def test_temperature_zero_takes_the_likeliest(vocabulary):
    logits = random_logits(12, vocabulary)
    np.testing.assert_array_equal(draw(logits, temperature=0.0), logits.argmax(-1))
    # Other settings do not matter then.
    tokens = draw(logits, temperature=0.0, top_k=3, top_p=0.5, min_p=0.1, seeds=7, positions=3)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_greedy_rows_stay_greedy_beside_sampled_ones():
    logits, rows = random_logits(), np.arange(512)
    tokens = draw(logits, temperature=np.where(rows % 2, 5.0, 0.0), seeds=rows)
    np.testing.assert_array_equal(tokens[::2], logits.argmax(-1)[::2])
    assert (tokens[1::2] != logits.argmax(-1)[1::2]).any()


def test_ties_go_to_the_first_token():
    logits = np.round(random_logits())
    np.testing.assert_array_equal(draw(logits, temperature=0.0), logits.argmax(-1))
    np.testing.assert_array_equal(draw(logits, top_k=1, seeds=np.arange(512)), logits.argmax(-1))


@pytest.mark.parametrize("setting", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_filters_at_their_tightest_leave_the_likeliest(setting):
    logits = random_logits()
    tokens = draw(logits, temperature=3.0, seeds=np.arange(512), **setting)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("top_k", [-1, 0, 64, 1000])
def test_top_k_of_all_changes_nothing(top_k):
    logits, seeds = random_logits(), np.arange(512)
    np.testing.assert_array_equal(draw(logits, seeds, top_k=top_k), draw(logits, seeds))


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_tokens_follow_the_softmax_over_seeds(temperature):
    logits = flat_logits(seed=1)
    assert_follows(draw_many(logits, positions=5, temperature=temperature), exact(logits, temperature))


def test_tokens_follow_the_softmax_over_the_positions_of_one_request():
    logits = flat_logits(seed=2) / 2
    tokens = draw_many(logits, seeds=1234, positions=np.arange(DRAWS))
    assert_follows(tokens, exact(logits))
    # Successive tokens are independent.
    assert_follows((tokens[:-1] * 12 + tokens[1:])[::2], np.outer(exact(logits), exact(logits)).ravel())


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
    {"top_p": 0.9, "min_p": 0.25},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.15, "temperature": 1.3},
]


@pytest.mark.parametrize("setting", FILTERS, ids=str)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_filtered_tokens_follow_the_filtered_distribution(setting, seed):
    logits = flat_logits(seed)
    assert_follows(draw_many(logits, **setting), exact(logits, **setting))


def test_filters_of_different_rows_do_not_mix():
    logits, count = flat_logits(seed=6), len(FILTERS)
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    settings = {name: np.array([(defaults | FILTERS[row % count])[name] for row in range(DRAWS)]) for name in defaults}
    tokens = draw_many(logits, **settings)
    for index, setting in enumerate(FILTERS):
        assert_follows(tokens[index::count], exact(logits, **setting))


def test_row_gets_the_same_token_whatever_its_batch_and_place():
    rows, random = 12, np.random.default_rng(8)
    logits = random_logits(rows, seed=8)
    settings = {
        "temperature": random.choice([0.0, 0.7, 1.0, 2.0], rows),
        "top_k": random.choice([0, 5, 40], rows),
        "top_p": random.choice([0.6, 0.9, 1.0], rows),
        "min_p": random.choice([0.0, 0.05], rows),
        "seeds": random.integers(0, 2**31, rows),
        "positions": random.integers(0, 4096, rows),
    }

    def at(index: np.ndarray) -> np.ndarray:
        return draw(logits[index], **{name: values[index] for name, values in settings.items()})

    whole = at(np.arange(rows))
    for row in range(rows):
        assert at(np.array([row])) == whole[row], "alone"
    for _ in range(5):
        order = random.permutation(rows)
        np.testing.assert_array_equal(at(order), whole[order])
    large = random.integers(0, rows, 512)
    np.testing.assert_array_equal(at(large), whole[large])


def test_seed_and_position_both_matter():
    logits, rows = np.zeros((512, 64), np.float32), np.arange(512)
    base = draw(logits, seeds=rows, positions=7)
    np.testing.assert_array_equal(base, draw(logits, seeds=rows, positions=7))
    assert (base != draw(logits, seeds=rows, positions=8)).mean() > 0.9
    assert (base != draw(logits, seeds=rows + 512, positions=7)).mean() > 0.9
    assert (base != draw(logits, seeds=7, positions=rows)).mean() > 0.9, "they are not interchangeable"


def test_all_32_bits_of_a_seed_count():
    seeds = np.array([1, 1 + 2**16, 1 + 2**31, 2**32 - 1] * 3, np.uint32).view(np.int32)
    tokens = draw(np.zeros((12, 5000), np.float32), seeds=seeds)
    assert len(set(tokens.tolist())) == 4


def test_shifting_all_logits_changes_nothing():
    logits = np.round(4 * random_logits()) / 4  # exact in float32, with 64 added too
    tokens = draw(logits, seeds=np.arange(512), top_p=0.9)
    np.testing.assert_array_equal(draw(logits + 64, seeds=np.arange(512), top_p=0.9), tokens)


@pytest.mark.parametrize("temperature", [1e-20, 1e-37, 2e-38])
def test_tiny_temperature_is_greedy(temperature):
    """Any temperature above 0 is allowed: dividing logits by a tiny one must not overflow."""
    logits = random_logits()
    tokens = draw(logits, seeds=np.arange(512), temperature=temperature)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_huge_temperature_is_uniform():
    assert_follows(draw_many(flat_logits(seed=7), temperature=3e38), np.full(12, 1 / 12))


def test_packed_settings_arrive_bit_for_bit(monkeypatch):
    """Floats travel as integers: not representable in fewer bits, subnormal, or at the edge of a range."""
    rows = [
        (SamplingParams(temperature=0.1, top_p=1 / 3, min_p=0.7, top_k=5), 0, 0),
        (
            SamplingParams(temperature=1e-45, top_p=float(np.nextafter(np.float32(1), 0)), top_k=-1),
            2**32 - 1,
            131071,
        ),
        (SamplingParams(temperature=3.4e38, top_p=1e-30, min_p=1.0, top_k=10**6), 2**31, 1),
    ]
    received = {}

    def record(logits: jax.Array, *settings: jax.Array) -> jax.Array:
        names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
        received.update(zip(names, settings, strict=True))
        return jnp.zeros(logits.shape[0], jnp.int32)

    monkeypatch.setattr("amoeba_jax.engine.sampler.sample", record)
    sample_packed(jnp.zeros((5, 3)), jnp.asarray(pack_sampling(rows, 5)))
    got = {name: np.asarray(values) for name, values in received.items()}
    for name in ("temperature", "top_p", "min_p"):
        expected = np.array([getattr(params, name) for params, _, _ in rows], np.float32)
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name][:3].view(np.int32), expected.view(np.int32), err_msg=name)
    np.testing.assert_array_equal(got["top_k"][:3], [5, 0, 10**6])
    np.testing.assert_array_equal(got["seeds"][:3].view(np.uint32), [0, 2**32 - 1, 2**31])
    np.testing.assert_array_equal(got["positions"][:3], [0, 131071, 1])
    for name, values in got.items():
        np.testing.assert_array_equal(values[3:], 1.0 if name == "top_p" else 0, err_msg=f"padding: {name}")


def test_packed_rows_draw_the_same_tokens():
    logits = random_logits(12, seed=9)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(temperature=1.7, top_p=0.8),
        SamplingParams(temperature=0.6, top_k=11),
        SamplingParams(min_p=0.02, top_k=-1),
    ]
    rows = [(p, 11 * index, 100 + index) for index, p in enumerate(params)]
    packed = jax.jit(sample_packed)(jnp.asarray(logits), jnp.asarray(pack_sampling(rows, 12)))
    for index, (p, seed, position) in enumerate(rows):
        alone = draw(logits[[index]], seed, position, p.temperature, p.top_k, p.top_p, p.min_p)
        assert packed[index] == alone[0]
    np.testing.assert_array_equal(packed[5:], logits.argmax(-1)[5:], err_msg="padding draws greedily")
