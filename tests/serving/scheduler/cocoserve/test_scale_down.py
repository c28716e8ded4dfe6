"""Algorithm 2: its phases come in order, and it ends as soon as the violation is resolved."""

from itertools import pairwise

import pytest
from placed_views import LAYERS, cluster, instance

from serving.scheduler import CocoServeConfig, Evict, LimitBatch, Migrate, Offload
from serving.scheduler.actions import identity
from serving.scheduler.cocoserve.algorithms import Reduction, scale_down

CONFIG = CocoServeConfig(migrated_share=0.1, batch_step=5)


def pressed(busy: float = 1.0, **fields):
    """Return a full instance 0 on a busy device, which also hosts two replicas of instance 1. Device 3 is empty."""
    full = instance(0, 30, homes={range(15, 20): (0, 1)})
    guest = instance(1, 4, homes={range(0, 8): (0, 1), range(12, 14): (0, 1)})
    return cluster(full, guest, instance(2, 20), busy={0: busy}, **fields)


def all_reductions(view, number: int = 0, slow: bool = False, config: CocoServeConfig = CONFIG) -> list[Reduction]:
    return list(scale_down(view, view.instances[number], config, slow, lambda: True))


def kinds(reductions: list[Reduction]) -> list[type]:
    return [type(reduction[0]) for reduction in reductions]


def test_phases_come_in_order():
    found = kinds(all_reductions(pressed(), slow=True))
    assert set(found) == {Migrate, Evict, LimitBatch}
    order = [Migrate, Evict, LimitBatch]
    assert all(order.index(one) <= order.index(two) for one, two in pairwise(found))


@pytest.mark.parametrize("needed", [0, 1, 2, 4, 6])
def test_it_ends_as_soon_as_the_violation_is_resolved(needed: int):
    view, done = pressed(), []

    def violated() -> bool:
        return len(done) < needed

    for reduction in scale_down(view, view.instances[0], CONFIG, True, violated):
        done += [reduction]
    assert done == all_reductions(view, slow=True)[:needed]


def test_layers_move_in_runs_from_the_end_until_the_device_has_memory():
    (first,), *_ = moves = [r for r in all_reductions(pressed(busy=0.5)) if isinstance(r[0], Migrate)]
    assert (first.layers, first.device, first.modules, first.move_kv) == ((13, 15), 1, "layer", True)
    assert "device 0 is short of memory" in first.reason
    # Device 1 has the next layers and the weights. A layer has 3 GB of cache, so two layers are a tenth of 60 GB.
    assert len(moves) == 1
    bigger = all_reductions(pressed(busy=0.5), config=CocoServeConfig(migrated_share=0.01))
    assert [r[0].layers for r in bigger if isinstance(r[0], Migrate)] == [(14, 15), (13, 14)]


def test_device_with_little_memory_gets_ffns_and_a_busy_device_gets_caches():
    view = cluster(instance(0, 30), num_devices=2, free={0: 0.0, 1: 3.6e9 * 1.2})
    view_of_small = cluster(instance(0, 30), num_devices=2, free={0: 0.0, 1: 60e9}, busy={1: 0.95})
    small = [r[0] for r in all_reductions(view) if isinstance(r[0], Migrate)]
    assert not small, "4% of a device is no relief"
    busy = [r[0] for r in all_reductions(view_of_small) if isinstance(r[0], Migrate)]
    assert {(a.modules, a.move_kv) for a in busy} == {("kv", True)}
    tight = cluster(instance(0, 30, tokens=1000), num_devices=2, free={0: 0.0, 1: 30e9})
    ten_each = CocoServeConfig(migrated_share=0.4)
    (move,) = [r[0] for r in all_reductions(tight, config=ten_each) if isinstance(r[0], Migrate)]
    assert (move.modules, move.move_kv, move.layers) == ("ffn", False, (12, LAYERS))


def test_busy_device_passes_layers_on_only_if_it_computes_for_several_instances():
    alone = cluster(instance(0, 10), instance(1, 0), busy={0: 1.0})
    assert Migrate not in kinds(all_reductions(alone))
    guest = instance(2, 4, homes={range(0, 8): (0, 2)})
    shared = cluster(instance(0, 10), instance(1, 0), guest, busy={0: 1.0, 2: 1.0})
    (move,) = [r[0] for r in all_reductions(shared) if isinstance(r[0], Migrate)]
    assert move.device in (1, 3)
    assert "busy with several instances" in move.reason


def test_least_useful_replicas_go_first():
    evicted = [r[0] for r in all_reductions(pressed()) if isinstance(r[0], Evict)]
    assert [(a.instance_id, a.layers, a.device) for a in evicted] == [
        (1, (12, 14), 0),  # two layers gain less than one layer, and cost two transitions
        (0, (15, 20), 1),
        (1, (0, 8), 0),
    ]


def test_replica_on_a_device_of_its_own_stays():
    view = cluster(instance(0, 10, homes={range(0, 10): (0, 3)}), instance(1, 10))
    assert Evict not in kinds(all_reductions(view))


def test_batch_falls_in_steps_and_the_least_urgent_are_offloaded():
    view = cluster(instance(0, 13), num_devices=1)
    (first, *offloads), (second, *more) = all_reductions(view, slow=True)
    assert (first, second) == (LimitBatch(0, 8, first.reason), LimitBatch(0, 5, second.reason))
    assert [a.request_id for a in offloads] == ["r8", "r9", "r10", "r11", "r12"], "the last arrivals"
    assert [a.request_id for a in more] == ["r5", "r6", "r7"]
    assert all(isinstance(a, Offload) for a in (*offloads, *more))


def test_batch_stays_if_steps_are_fast_enough():
    """Requests are late in the queue. With a smaller batch they would wait longer."""
    assert all_reductions(cluster(instance(0, 13), num_devices=1)) == []


def test_layers_stay_if_steps_are_slow_on_a_full_device():
    """Memory is not the cause, and further devices make steps longer."""
    assert set(kinds(all_reductions(cluster(instance(0, 30)), slow=True))) == {LimitBatch}


def test_refused_reductions_are_left_out():
    view = pressed()
    first = all_reductions(view)[0][0]
    assert first not in [r[0] for r in all_reductions(pressed(refused_changes=frozenset([identity(first)])))]
    refused = frozenset(identity(r[0]) for r in all_reductions(view, slow=True) if isinstance(r[0], Evict))
    left = kinds(all_reductions(pressed(refused_changes=refused), slow=True))
    assert (Evict in left, LimitBatch in left) == (False, True)
