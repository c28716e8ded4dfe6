"""Figures of the last seconds, compared with plain lists of the measured values."""

from collections import defaultdict

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from serving.runtime.timeline import Second, Timeline

EVENTS = st.lists(
    st.tuples(st.floats(0, 3), st.sampled_from(["tokens", "ttft", "itl"]), st.floats(0.001, 100)), max_size=60
)


@given(EVENTS, st.integers(1, 8))
def test_seconds_have_the_values_that_were_measured_in_them(events: list[tuple[float, str, float]], length_s: int):
    now = 100.5
    timeline = Timeline(length_s, clock=lambda: now)
    measured: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for wait_s, kind, value in events:
        now += wait_s
        measured[int(now)][kind].append(value)
        if kind == "tokens":
            timeline.add_tokens(round(value))
        else:
            getattr(timeline, f"add_{kind}")(value)
    now += 1
    rows = timeline.seconds()
    assert [row.start_s for row in rows] == list(range(max(100, int(now) - length_s), int(now)))
    for row in rows:
        values = measured.get(row.start_s, {})
        ttft, itl = values.get("ttft", []), values.get("itl", [])

        def percentile(of: list[float], percent: float) -> float | None:
            return float(np.percentile(of, percent, method="inverted_cdf")) if of else None

        assert row == Second(
            row.start_s,
            sum(map(round, values.get("tokens", []))),
            percentile(ttft, 50),
            max(ttft, default=None),
            percentile(itl, 50),
            percentile(itl, 99),
        )
    assert timeline.seconds(2) == rows[-2:]


def test_old_seconds_are_forgotten():
    now = 0.0
    timeline = Timeline(5, clock=lambda: now)
    for second in range(1000):
        now = float(second)
        timeline.add_itl(0.1)
    assert len(timeline._closed) <= 6
    now = 5000.0
    assert [row.tokens for row in timeline.seconds()] == [0] * 5
