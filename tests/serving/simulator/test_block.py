"""Consecutive steps as one event, compared with a sum over single steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.simulator.block import Block

firsts, slopes, counts = st.floats(1e-3, 1.0), st.floats(0, 1e-3), st.integers(1, 300)


def ends(block: Block, steps: int) -> list[float]:
    """Return the end of each step, added up step by step."""
    found, now_s = [], block.start_s
    for step in range(steps):
        now_s += block.first_s + block.slope_s * step
        found.append(now_s)
    return found


@given(firsts, slopes, counts)
def test_end_is_the_sum_of_the_steps(first_s: float, slope_s: float, steps: int):
    block = Block(5.0, steps, first_s, slope_s)
    assert block.end_s == pytest.approx(ends(block, steps)[-1], rel=1e-9)


@given(firsts, slopes, counts, st.floats(0, 1))
def test_done_counts_steps_that_have_ended(first_s: float, slope_s: float, steps: int, share: float):
    block = Block(0.0, steps, first_s, slope_s)
    now_s = share * block.end_s
    wanted = sum(end <= now_s for end in ends(block, steps))
    assert block.done(now_s) == pytest.approx(wanted, abs=int(any(abs(e - now_s) < 1e-6 for e in ends(block, steps))))


@given(firsts, slopes, st.integers(2, 300), st.floats(0.001, 0.99))
def test_cut_ends_with_the_step_that_runs(first_s: float, slope_s: float, steps: int, share: float):
    block = Block(2.0, steps, first_s, slope_s)
    all_ends, now_s = ends(block, steps), 2.0 + share * (block.end_s - 2.0)
    block.cut(now_s)
    assert block.end_s >= now_s - 1e-6
    assert min(abs(block.end_s - end) for end in all_ends) < 1e-6
    assert block.end_s - now_s <= block.first_s + block.slope_s * steps + 1e-6
    Block(2.0, steps, first_s, slope_s).cut(2.0)


def test_cut_at_the_start_leaves_nothing():
    block = Block(1.0, 9, 0.1)
    assert block.cut(1.0)
    assert block.steps == 0
