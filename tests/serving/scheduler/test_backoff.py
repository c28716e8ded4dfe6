"""Refusals and their back-off times."""

from serving.scheduler import ClusterView, DegreeLimits, InstanceView, ScaleDown, ScaleUp
from serving.scheduler.backoff import Backoff, BackoffConfig

MERGE = ScaleUp((0, 1), 2, "")


def test_a_refusal_that_none_followed_for_long_counts_no_more():
    """It expires at its own time, not when old refusals are dropped."""
    config = BackoffConfig(first_s=1.0, factor=2.0, longest_s=10.0)
    backoff = Backoff(config)
    assert backoff.refuse(MERGE, 0.0) == 1.0
    assert backoff.refused_transformations(0.5) == {((0, 1), 2)}
    assert backoff.refused_transformations(1.0) == frozenset()
    assert backoff.refuse(MERGE, 15.0) == 2.0
    backoff.refused_transformations(36.9)  # old refusals are dropped again in 10 s
    assert backoff.refuse(MERGE, 37.0) == 1.0, "2 + 20 s after the one at 15 s"


def test_refused_transformations_end_with_their_time_or_a_success():
    backoff, split = Backoff(BackoffConfig(first_s=1.0, factor=2.0, longest_s=10.0)), ScaleDown((0, 1), 1, "")
    backoff.refuse(MERGE, 0.0)
    assert backoff.refused_transformations(0.9) == {((0, 1), 2)}
    backoff.refuse(split, 0.9)
    assert backoff.refused_transformations(0.9) == {((0, 1), 2), ((0, 1), 1)}
    assert backoff.refused_transformations(1.0) == {((0, 1), 1)}
    assert backoff.refused_transformations(1.9) == frozenset()
    backoff.refuse(MERGE, 2.0)
    assert backoff.refused_transformations(2.0) == {((0, 1), 2)}
    backoff.accept(MERGE)
    there = InstanceView(0, (0, 1), 100, 100, 8)
    backoff.ended(ClusterView(2.5, (there,), (), (DegreeLimits(2, 100, 8),), 2))
    assert backoff.refused_transformations(2.5) == frozenset(), "what succeeded is not refused any more"
