"""Kept views are forgotten together with their buffers."""

import jax
import pytest

from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.models.kinds import LayerKind
from amoeba_jax.weights.group_views import GroupViews
from sharding.mesh import SubMeshPool

KIND = LayerKind()
FIRST, SECOND, HEAD = SegmentPlan(0, (KIND, KIND)), SegmentPlan(2, (KIND,)), SegmentPlan(3, ())


@pytest.fixture(name="pool")
def groups_of_all_degrees() -> SubMeshPool:
    return SubMeshPool(tuple(jax.devices()[:4]), 4)


def kept(pool: SubMeshPool) -> GroupViews:
    """Return views that keep the lists of three segments for all groups."""
    views = GroupViews()
    for tp in pool.degrees():
        for group in pool.groups(tp):
            views.of_segments(group).update({plan: [] for plan in (FIRST, SECOND, HEAD)})
    return views


def forgotten(views: GroupViews, pool: SubMeshPool) -> dict[tuple[int, int], set[SegmentPlan]]:
    """Return the segments without a list, by the first device and the degree of the group."""
    groups = [group for tp in pool.degrees() for group in pool.groups(tp)]
    gone = {(g.start, g.tp): {FIRST, SECOND, HEAD} - views.of_segments(g).keys() for g in groups}
    return {key: plans for key, plans in gone.items() if plans}


def test_released_shards_are_in_no_list_of_a_lower_degree(pool: SubMeshPool):
    views = kept(pool)
    views.forget_shards(pool.group(0, 2), 1, [0], {"up_proj": 2})
    assert forgotten(views, pool) == {(0, 1): {FIRST}, (1, 1): {FIRST}}
    views.forget_shards(pool.group(0, 4), 2, [0], {"up_proj": 4})
    assert forgotten(views, pool) == {
        (0, 1): {FIRST, SECOND},
        (1, 1): {FIRST, SECOND},
        (2, 1): {SECOND},
        (3, 1): {SECOND},
        (0, 2): {SECOND},
        (2, 2): {SECOND},
    }


def test_a_parameter_that_is_replaced_is_in_no_list(pool: SubMeshPool):
    views = kept(pool)
    views.forget_parameter(pool.group(2, 1), 2, "up_proj")
    assert forgotten(views, pool) == {(2, 1): {SECOND}, (2, 2): {SECOND}, (0, 4): {SECOND}}
    views.forget_parameter(pool.group(2, 1), None, "embed_tokens")  # all segments may have this parameter
    assert forgotten(views, pool) == {key: {FIRST, SECOND, HEAD} for key in [(2, 1), (2, 2), (0, 4)]}
    views.clear()
    assert all(plans == {FIRST, SECOND, HEAD} for plans in forgotten(views, pool).values())
