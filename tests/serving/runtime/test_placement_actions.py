"""Placement changes by the engine's executor, and the placements and devices in its snapshots."""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from executor_harness import CACHE, SLOTS, JaxHarness, apply, of, snapshot

from amoeba_jax import LLM
from amoeba_jax.engine.engine import Engine
from amoeba_jax.transform.report import PlacementReport
from serving.runtime import device_reader
from serving.runtime.jax_executor import EngineScheduler, layer_sizes
from serving.scheduler import (
    ClusterView,
    Dispatch,
    Evict,
    LimitBatch,
    Migrate,
    Offload,
    PlacementChange,
    PlacementView,
    Replicate,
    ScaleIn,
    ScaleOut,
)

pytestmark = pytest.mark.usefixtures("quick_compile")

NUM_LAYERS = 2


@pytest.fixture
def jax(executor_llm: LLM) -> Iterator[JaxHarness]:
    """Yield a harness with two instances of one device."""
    harness = JaxHarness(executor_llm)
    yield harness
    harness.close()
    assert all(view.placement.home is not None for view in executor_llm.instances if view.placement)


def settled(view: ClusterView) -> bool:
    return not any(instance.changes_placement for instance in view.instances)


def change(jax: JaxHarness, action: PlacementChange) -> ClusterView:
    """Carry out an action and return the first snapshot after it."""
    (outcome,) = apply(jax, action)
    assert outcome.accepted, outcome.detail
    return jax.until(settled)


def test_snapshots_have_layers_and_devices(jax: JaxHarness, executor_llm: LLM):
    view = snapshot(jax)
    assert [(i.placement, i.changes_placement, i.batch_limit) for i in view.instances] == [(None, False, None)] * 2
    assert view.layer is not None
    assert view.layer == layer_sizes(executor_llm._engine)
    owners = executor_llm.memory().by_owner(0)
    assert view.layer.num_layers == NUM_LAYERS
    assert view.layer.ffn_bytes == owners["ffn weights"] / NUM_LAYERS
    assert view.layer.attention_bytes == (owners["attention weights"] + owners["norm weights"]) / NUM_LAYERS
    assert view.layer.other_bytes == owners["embedding"] + owners["final_norm"] + owners["head"]
    assert view.layer.kv_token_bytes * CACHE * NUM_LAYERS == owners["kv cache"]
    assert [device.id for device in view.devices] == [0, 1]
    for device in view.devices:
        assert 0 < device.free_bytes == device.memory_bytes
        assert 0 <= device.vacancy <= 1


@pytest.fixture
def frequent_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the devices at each snapshot, because a request may end within a second."""
    monkeypatch.setattr(device_reader, "INTERVAL_S", 0)


@pytest.mark.usefixtures("frequent_readings")  # precedes `jax`, which reads the devices at its start
def test_pages_of_running_requests_are_not_free(jax: JaxHarness):
    (name,) = jax.start([(30, 20)])
    apply(jax, Dispatch(name, 0))
    view = jax.until(lambda view: view.devices[0].free_bytes < view.devices[0].memory_bytes)
    assert view.devices[1].free_bytes == view.devices[1].memory_bytes


def test_layers_replicate_and_leave_while_a_request_runs(jax: JaxHarness):
    (name,) = jax.start([(8, 50)])
    apply(jax, Dispatch(name, 0))
    (outcome,) = apply(jax, Replicate(0, (0, 1), 1))
    assert outcome.accepted, outcome.detail
    view = jax.until(lambda view: settled(view) and view.instances[0].placement is not None)
    homes = ((0, 1), (0,))
    assert view.instances[0].placement == PlacementView(homes, homes)
    assert view.guests(1) == (view.instances[0],)
    assert of(view, name).id == 0
    assert change(jax, Evict(0, (0, 1), 1)).instances[0].placement is None


def test_parts_of_layers_migrate(jax: JaxHarness):
    view = change(jax, Migrate(0, (1, 2), 1, modules="ffn"))
    assert view.instances[0].placement == PlacementView(((0,), (0,)), ((0,), (1,)))
    assert change(jax, Migrate(0, (1, 2), 0, modules="ffn")).instances[0].placement is None


@pytest.mark.parametrize(
    "action",
    [
        Replicate(0, (0, 1), 0),
        Replicate(0, (0, 9), 1),
        Replicate(0, (0, 1), 7),
        Replicate(5, (0, 1), 1),
        Evict(0, (0, 1), 1),
        Migrate(0, (0, 1), 0),
        ScaleOut(0, 1),
        ScaleIn(0, 0),
    ],
)
def test_impossible_changes_are_refused_with_the_reason(jax: JaxHarness, action: PlacementChange):
    before = snapshot(jax).instances
    (outcome,) = apply(jax, action)
    assert not outcome.accepted
    assert outcome.detail
    assert snapshot(jax).instances == before


def test_changes_are_reported(executor_llm: LLM):
    ended: list[tuple[PlacementChange, Future[PlacementReport]]] = []

    class Once:
        """Policy that requests one change."""

        name = "once"

        def __init__(self, action: PlacementChange):
            self._left = [action]

        def decide(self, view: ClusterView) -> list[Any]:
            return [self._left.pop()] if self._left else []

    def install(engine: Engine, action: PlacementChange) -> EngineScheduler:
        return EngineScheduler(engine, Once(action), on_placed=lambda *done: ended.append(done))

    for action in (Replicate(0, (0, 2), 1), Evict(0, (0, 2), 1)):
        hook = executor_llm.use_scheduler_hook(lambda engine, action=action: install(engine, action))
        executor_llm._dispatcher.call(hook.scheduler.tick).result()
        jax = JaxHarness(executor_llm)
        jax.until(settled)
        jax.close()
    assert [(action.device, done.result().kind) for action, done in ended] == [(1, "replicate"), (1, "evict")]


def test_batches_are_limited(jax: JaxHarness):
    names = jax.start([(4, 40)] * 3)
    apply(jax, LimitBatch(0, 2))
    assert (snapshot(jax).instances[0].batch_limit, snapshot(jax).instances[0].free_slots) == (2, 2)
    outcomes = apply(jax, *(Dispatch(name, 0) for name in names))
    assert [outcome.accepted for outcome in outcomes] == [True, True, False]
    assert snapshot(jax).instances[0].free_slots == 0
    apply(jax, LimitBatch(0, None))
    view = snapshot(jax).instances[0]
    assert (view.batch_limit, view.free_slots) == (None, SLOTS - len(view.running))
    (outcome,) = apply(jax, Dispatch(names[2], 0))
    assert outcome.accepted


def test_requests_are_offloaded_and_continue(jax: JaxHarness, executor_llm: LLM):
    """The tokens are not computed again: the count of prompt tokens does not change."""
    (name,) = jax.start([(20, 30)])
    apply(jax, Dispatch(name, 0))
    jax.until(lambda view: any(r.num_tokens > 22 for i in view.instances for r in i.running))
    computed = executor_llm.stats.prompt_tokens
    (outcome,) = apply(jax, Offload(name))
    assert outcome.accepted, outcome.detail
    view = jax.until(lambda view: bool(view.queue))
    assert [(r.request_id, r.offloaded) for r in view.queue] == [(name, True)]
    assert not any(i.running for i in view.instances)
    (outcome,) = apply(jax, Dispatch(name, 1))
    assert outcome.accepted, outcome.detail
    jax.until(lambda view: not any(i.running for i in view.instances))
    assert executor_llm.stats.prompt_tokens == computed
