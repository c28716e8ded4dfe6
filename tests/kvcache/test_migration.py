"""Plans of phases, run on NumPy arrays: every piece arrives, for any moves, even on full ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.migration import GENERAL_COST, PADDING, Phase, phase_shape, plan_phases


def run(phases: list[Phase], memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Run phases on `memory` `[ranks, ids]`. Return its contents, and how often each slot was written."""
    memory, writes = memory.copy(), np.zeros(memory.shape, int)
    for phase in phases:
        received = np.full_like(phase.send, -1)
        for rank, ids in enumerate(phase.send):  # all ranks read before the first one writes
            sent = np.where(ids == PADDING, -1, memory[rank, ids])
            if phase.distance is not None:
                received[rank ^ phase.distance] = sent
                continue
            for distance, pieces in enumerate(sent):
                received[rank ^ distance, distance] = pieces
        for rank, ids in enumerate(phase.receive):
            np.testing.assert_array_equal(ids == PADDING, received[rank] == -1)
            valid = ids[ids != PADDING]
            assert len(set(valid.tolist())) == len(valid)
            memory[rank, valid] = received[rank][ids != PADDING]
            writes[rank, valid] += 1
    return memory, writes


def check(source: np.ndarray, target: np.ndarray, num_ranks: int, num_ids: int, phase_pieces: int) -> list[Phase]:
    phases = plan_phases(source, target, num_ranks, phase_pieces)
    for phase in phases:
        shape = (num_ranks, *phase_shape(num_ranks, phase_pieces, phase.distance))
        assert phase.send.shape == phase.receive.shape == shape
        assert phase.send.dtype == phase.receive.dtype == np.int32
        assert phase.distance is None or phase.distance in range(num_ranks)
    assert all((p.send != PADDING).any() for p in phases)
    before = np.arange(num_ranks * num_ids).reshape(num_ranks, num_ids)
    after, writes = run(phases, before)
    expected = before.copy()
    expected[tuple(target.T)] = before[tuple(source.T)]
    np.testing.assert_array_equal(after, expected)
    is_source, is_target = np.zeros((2, num_ranks, num_ids), bool)
    is_source[tuple(source.T)] = is_target[tuple(target.T)] = True
    assert not writes[~is_target].any()
    assert (writes[is_target & ~is_source] == 1).all()
    return phases


def cost(phases: list[Phase]) -> float:
    """Return the total cost of phases. Phases between pairs of ranks cost less."""
    return sum(GENERAL_COST if phase.distance is None else 1 for phase in phases)


def bound(source: np.ndarray, target: np.ndarray, num_ranks: int, phase_pieces: int) -> int:
    """Return a lower bound of the number of general phases."""
    pairs = np.bincount(source[:, 0] * num_ranks + target[:, 0])
    return -(-pairs.max() // phase_pieces)


def slots(codes: np.ndarray, num_ids: int) -> np.ndarray:
    return np.stack(np.divmod(codes, num_ids), axis=1)


@settings(max_examples=300)
@given(
    num_ranks=st.sampled_from([1, 2, 4]),
    num_ids=st.integers(1, 40),
    phase_pieces=st.integers(2, 20),
    occupied=st.sampled_from([0.0, 0.3, 0.8, 0.97, 1.0]),
    copied=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_piece_arrives(num_ranks, num_ids, phase_pieces, occupied, copied, seed):
    random = np.random.default_rng(seed)
    num_slots = num_ranks * num_ids
    num_moves = round(num_slots * occupied)
    # Some ranks may have no pieces, others all. Any slot may be a source and a target.
    weight = random.choice([0.01, 1.0, 1.0], num_ranks).repeat(num_ids)
    sources, targets = (
        random.choice(num_slots, num_moves, replace=False, p=weight / weight.sum(), shuffle=True) for _ in range(2)
    )
    again = random.random(num_moves) < copied
    if num_moves:
        sources[again] = random.choice(sources, again.sum())
    check(slots(sources, num_ids), slots(targets, num_ids), num_ranks, num_ids, phase_pieces)


@pytest.mark.parametrize("phase_pieces", [2, 3, 8, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_full_ranks_turn_in_one_long_cycle(num_ranks, phase_pieces):
    num_ids = 300
    for codes in (np.arange(num_ranks * num_ids), np.random.default_rng(1).permutation(num_ranks * num_ids)):
        source, target = slots(codes, num_ids), slots(np.roll(codes, -1), num_ids)
        check(source, target, num_ranks, num_ids, phase_pieces)


def test_cycle_waits_for_the_copies_that_leave_it():
    num_ids, phase_pieces = 50, 4
    on_cycle = np.arange(20)
    source = np.concatenate([on_cycle, on_cycle, np.full(20, 3)])
    target = np.concatenate([np.roll(on_cycle, 1), on_cycle + 60, np.arange(80, 100)])
    check(slots(source, num_ids), slots(target, num_ids), 2, num_ids, phase_pieces)


@pytest.mark.parametrize("phase_pieces", [32, 128])
@pytest.mark.parametrize("kind", ["free", "swaps", "permutation", "almost full", "copies"])
def test_phases_are_few(kind, phase_pieces):
    random = np.random.default_rng(5)
    num_ranks, num_ids = 4, 4000
    num_slots = num_ranks * num_ids
    sources = random.permutation(num_slots)
    targets = random.permutation(num_slots)
    if kind == "free":
        sources, targets = sources[: num_slots // 2], sources[num_slots // 2 :]
    elif kind == "swaps":
        targets = sources.reshape(-1, 2)[:, ::-1].reshape(-1)
    elif kind == "almost full":
        sources, targets = sources[:-200], targets[:-200]
    elif kind == "copies":
        sources[::5] = sources[0]
    source, target = slots(sources, num_ids), slots(targets, num_ids)
    phases = check(source, target, num_ranks, num_ids, phase_pieces)
    lowest = bound(source, target, num_ranks, phase_pieces)
    # Cut cycles need additional moves, and the last of these wait for all others.
    most = 1.2 * lowest + 3 if kind == "permutation" else lowest + 1
    assert cost(phases) <= GENERAL_COST * most + 1e-6


def test_moves_that_others_wait_for_go_first():
    """Rank 0 sends 20 pieces to ranks 1 and 3 each. Half of their slots are needed for 20 pieces of rank 2."""
    source = [(0, n) for n in range(40)] + [(2, n) for n in range(20)]
    target = [(1 + n // 20 * 2, n) for n in range(40)] + [(0, n % 10 + 10 + n // 10 * 20) for n in range(20)]
    phases = check(np.array(source), np.array(target), 4, 40, 10)
    assert [phase.distance for phase in phases] == [None, None]


def test_many_pieces_between_the_same_ranks_have_phases_of_their_own():
    ranks, ids = (axis.reshape(-1) for axis in np.meshgrid(np.arange(4), np.arange(500), indexing="ij"))
    source = np.stack([ranks, ids], axis=1)
    for num_apart in (1, 2, 3):
        target = np.stack([ranks ^ num_apart, ids + 500], axis=1)
        phases = check(source, target, 4, 1000, 32)
        assert [phase.distance for phase in phases] == [num_apart] * 4  # 128 pieces for each pair
    # One rank receives all pieces, so three of the four pairs of each distance are idle.
    target = np.stack([np.zeros(2000, int), 500 + np.arange(2000)], axis=1)
    phases = check(source, target, 4, 2500, 32)
    assert [phase.distance for phase in phases].count(None) <= 1
    assert len(phases) <= 17
    # A few pieces for every pair move in one general phase.
    ranks, others = np.divmod(np.arange(16), 4)
    source, target = np.stack([ranks, others], axis=1), np.stack([others, ranks + 10], axis=1)
    (phase,) = check(source, target, 4, 20, 32)
    assert phase.distance is None


def test_vacated_slot_is_filled_in_the_same_phase():
    source, target = np.array([(0, 0), (1, 0)]), np.array([(1, 0), (1, 1)])
    (phase,) = check(source, target, 2, 2, 2)
    np.testing.assert_array_equal(phase.send, [[[-1, -1], [0, -1]], [[0, -1], [-1, -1]]])
    np.testing.assert_array_equal(phase.receive, [[[-1, -1], [-1, -1]], [[1, -1], [0, -1]]])


def test_nothing_to_move_is_no_phase():
    nothing = np.zeros((0, 2), np.int64)
    assert plan_phases(nothing, nothing, 4, 8) == []
    stays = np.array([(0, 1), (3, 2)])
    assert plan_phases(stays, stays, 4, 8) == []


def test_bad_moves_are_refused():
    source, target = np.array([(0, 0), (1, 1)]), np.array([(1, 0), (0, 2)])
    with pytest.raises(ValueError, match="phase_pieces is 1; it must be at least 2"):
        plan_phases(source, target, 2, 1)
    with pytest.raises(ValueError, match="two moves have the same target"):
        plan_phases(source, target[[0, 0]], 2, 2)
    with pytest.raises(ValueError, match="ranks up to 1 and numbers from 0: ranks must be below 1"):
        plan_phases(source, target, 1, 2)
    with pytest.raises(ValueError, match="numbers from -2: ranks must be below 2, and no number negative"):
        plan_phases(source, -target, 2, 2)
