"""Stored heads: every model head occurs once, with its own KV head, at every degree."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.errors import LayoutError
from sharding.heads import HeadLayout

KV_HEADS, GROUPS, DEGREES = st.integers(1, 20), st.integers(1, 9), st.sampled_from([1, 2, 4])


@given(num_kv_heads=KV_HEADS, model_group=GROUPS, max_tp=DEGREES)
def test_every_model_head_is_stored_beside_its_own_kv_head(num_kv_heads, model_group, max_tp):
    num_heads = num_kv_heads * model_group
    layout = HeadLayout.plan(num_heads, num_kv_heads, max_tp)
    kv_rows, q_rows = layout.kv_rows().tolist(), layout.q_rows().tolist()
    assert len(kv_rows) == layout.kv_heads
    assert len(q_rows) == layout.kv_heads * layout.group

    assert sorted(row for row in q_rows if row >= 0) == list(range(num_heads)), "each query head exactly once"
    copies = Counter(row for row in kv_rows if row >= 0)
    assert copies == dict.fromkeys(range(num_kv_heads), layout.kv_copies)
    for stored, kv_head in enumerate(kv_rows):
        for query in q_rows[stored * layout.group : (stored + 1) * layout.group]:
            if query >= 0:
                assert kv_head == query // model_group, "a query head sees the KV head it has in the model"


@given(num_kv_heads=KV_HEADS, model_group=GROUPS, max_tp=DEGREES)
def test_stored_kv_heads_divide_by_every_degree_with_least_padding(num_kv_heads, model_group, max_tp):
    num_heads = num_kv_heads * model_group
    layout = HeadLayout.plan(num_heads, num_kv_heads, max_tp)
    assert layout.kv_heads % max_tp == 0
    assert layout.kv_heads - num_kv_heads < max_tp, "never a whole extra head per rank"
    assert layout.kv_padding == pytest.approx(len(layout.kv_rows()) / num_kv_heads)
    assert len(layout.q_rows()) >= num_heads
    if num_kv_heads % max_tp == 0:
        assert layout.kv_padding == len(layout.q_rows()) / num_heads == 1
        np.testing.assert_array_equal(layout.q_rows(), np.arange(num_heads))
    if max_tp % num_kv_heads == 0:
        assert (layout.kv_rows() >= 0).all(), "replicas instead of zero heads: no rank idles"
        assert layout.kv_heads * layout.group < num_heads + layout.kv_heads, "less than one padded head per copy"


@given(num_kv_heads=KV_HEADS, model_group=GROUPS, max_tp=DEGREES)
def test_ranks_of_a_lower_degree_hold_whole_neighbours_of_a_higher_one(num_kv_heads, model_group, max_tp):
    """At every degree a rank has contiguous stored heads, and the KV heads of all its query heads."""
    layout = HeadLayout.plan(num_kv_heads * model_group, num_kv_heads, max_tp)
    for tp in (degree for degree in (1, 2, 4) if degree <= max_tp):
        edges = range(0, layout.kv_heads + 1, layout.kv_heads // tp)
        assert len(edges) == tp + 1
        for start, stop in pairwise(edges):
            served = set(layout.q_rows()[start * layout.group : stop * layout.group]) - {-1}
            held = set(layout.kv_rows()[start:stop])
            assert {query // model_group for query in served} <= held


@pytest.mark.parametrize(
    ("model", "heads", "kv_heads", "max_tp", "stored", "group", "copies"),
    [
        ("Llama-3.1-8B", 32, 8, 4, 8, 4, 1),
        ("Qwen2.5-32B", 40, 8, 4, 8, 5, 1),
        ("SmolLM2-135M", 9, 3, 4, 4, 3, 1),
        ("SmolLM2-135M", 9, 3, 2, 4, 3, 1),
        ("Qwen2.5-0.5B", 14, 2, 4, 4, 4, 2),
        ("multi-query", 8, 1, 4, 4, 2, 4),
        ("one head", 1, 1, 4, 4, 1, 4),
        ("six KV heads", 6, 6, 4, 8, 1, 1),
    ],
)
def test_plans_of_known_models(model, heads, kv_heads, max_tp, stored, group, copies):
    layout = HeadLayout.plan(heads, kv_heads, max_tp)
    assert (layout.kv_heads, layout.group, layout.kv_copies) == (stored, group, copies), model


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 3), (4, 0), (4, -2), (2, 4)])
def test_heads_that_cannot_be_grouped_are_refused(heads, kv_heads):
    with pytest.raises(LayoutError, match=f"{heads} query heads cannot be grouped over {kv_heads} KV heads"):
        HeadLayout.plan(heads, kv_heads, 4)
