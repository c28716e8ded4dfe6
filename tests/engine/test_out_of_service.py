"""If instances cannot be rebuilt after a failed step, the engine continues, and their devices return later."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from device_memory import settled_live_bytes
from harness import engine_of, in_dispatcher
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_config, tiny_model, write_model
from transform_cases import SHARED, Background, decoding, make, requests, tokens, wait_until_decoding

from amoeba_jax import LLM
from amoeba_jax.errors import RequestError, TransformError
from amoeba_jax.instances import cluster as cluster_module
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.factory import InstanceFactory
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.weights import store
from sharding.mesh import SubMesh

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    directory = tiny_model("llama2", tmp_path_factory.mktemp("models"))
    with make(directory, compile_cache, device_memory="16MiB", **SHARED) as llm:
        yield llm


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """Yield the engine as 4 x TP1 without requests. Afterwards, check that no page or byte is lost."""
    before = booked(llm)
    yield llm
    if any(view.tensor_parallel_size > 1 for view in llm.instances):
        llm.transform(1)
    check_idle(llm)
    assert booked(llm) == before


class NoMemory:
    """Makes an allocation of weights or caches fail if `fails(number)`. Numbers start at 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool] = lambda number: False):
        self.fails, self.count = fails, 0
        monkeypatch.setattr(store, "put", self._failing(store.put))
        monkeypatch.setattr(jnp, "zeros", self._failing(jnp.zeros))

    def _failing(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        zeros = jnp.zeros

        def call(*arguments: Any, **options: Any) -> Any:
            if allocate is zeros and "device" not in options:
                return allocate(*arguments, **options)  # traced for a program
            self.count += 1
            if self.fails(self.count):
                raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: injected at allocation {self.count}")
            return allocate(*arguments, **options)

        return call


def revive(llm: LLM) -> None:
    """Bring groups back that are out of service, as the loop of the engine does once a second."""
    cluster = engine_of(llm).cluster

    def now() -> None:
        cluster._next_revival_s = 0.0
        cluster.revive()

    in_dispatcher(llm, now)


def booked(llm: LLM) -> tuple[list[dict[Any, int]], list[int]]:
    """Return each device's ledger, and its live bytes outside the ledger.

    Drain first: a step may still be in flight after its requests have ended.
    """
    in_dispatcher(llm, engine_of(llm).drain)
    ledgers, live = engine_of(llm).cluster.ledgers, settled_live_bytes()
    unbooked = [live.get(device, 0) - ledger.live_bytes for device, ledger in enumerate(ledgers)]
    return [{key: size for key, size in ledger.entries.items() if size} for ledger in ledgers], unbooked


def lose(llm: LLM, devices: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """Fail a step of each instance on these devices while allocations fail. The devices go out of service."""

    def no_memory(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    def fail() -> None:
        engine = engine_of(llm)
        with pytest.MonkeyPatch.context() as patch:
            NoMemory(patch, lambda number: True)
            patch.setattr(Cluster, "rebuild", no_memory)
            for instance in engine.instances:
                if instance.id in devices:
                    engine.steps.recover(instance, RuntimeError("injected"))

    in_dispatcher(llm, fail)


@pytest.mark.first_by_default
@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_group_is_out_of_service_until_there_is_memory(idle: LLM, degree: int):
    """The engine and the other instances continue. After the return, every byte has its owner again."""
    devices, other = [0, 1], 3 - degree
    asked = requests(8, max_tokens=32)
    expected = tokens(idle.generate(*asked))
    idle.transform(degree, devices)
    before, ids = booked(idle), [view.id for view in idle.instances]
    running = Background(idle, *asked)
    wait_until_decoding(idle, 4)
    lose(idle, (0, 1))
    assert [view.id for view in idle.instances] == [2, 3]
    with pytest.raises(RequestError, match="out of service"):
        idle.transform(other, devices)
    assert tokens(running.result()) == expected
    revive(idle)
    assert [view.id for view in idle.instances] == ids
    assert booked(idle) == before
    idle.transform(other, devices)
    assert tokens(idle.generate(*asked)) == expected


def test_groups_come_back_as_far_as_there_is_memory(idle: LLM, monkeypatch: pytest.MonkeyPatch):
    before, make_instance = booked(idle), InstanceFactory.empty_instance

    def fails_on_1(factory: InstanceFactory, group: SubMesh, *arguments: Any) -> Any:
        instance = make_instance(factory, group, *arguments)
        if group.start == 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        return instance

    lose(idle, (0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(InstanceFactory, "empty_instance", fails_on_1)
        for _ in range(2):
            revive(idle)
            assert [view.id for view in idle.instances] == [0, 2, 3]
    revive(idle)
    assert [view.id for view in idle.instances] == [0, 1, 2, 3]
    assert booked(idle) == before


def test_revival_is_tried_at_intervals(idle: LLM, monkeypatch: pytest.MonkeyPatch):
    """A longer attempt leads to a longer interval. If nothing is out of service, there are no attempts."""
    cluster, now, tried = engine_of(idle).cluster, [100.0], []

    def fails(*arguments: Any) -> Any:
        tried.append(now[0])
        now[0] += 2.0
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    def time_passes() -> None:
        for later in (0.5, 0.4, 0.2, 10.0, 25.0, 1.5):
            now[0] += later
            assert not cluster.revive()

    with monkeypatch.context() as patch:
        patch.setattr(InstanceFactory, "empty_instance", fails)
        assert not in_dispatcher(idle, cluster.revive)
        assert tried == []
    with monkeypatch.context() as patch:
        patch.setattr(cluster_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        lose(idle, (0, 1))
        patch.setattr(InstanceFactory, "empty_instance", fails)
        in_dispatcher(idle, time_passes)
        assert tried == pytest.approx([101.1, 103.1, 141.6, 143.6]), "two groups each time"
    revive(idle)
    assert not cluster.lost


def test_requests_wait_while_no_instance_is_left(idle: LLM):
    """Running and new requests wait until instances return."""
    running, expected = decoding(idle, 4, requests(8, max_tokens=32))
    lose(idle)
    assert idle.instances == ()
    late = Background(idle, *running.asked)
    revive(idle)
    assert tokens(running.result()) == expected
    assert tokens(late.result()) == expected
    assert [view.tensor_parallel_size for view in idle.instances] == [1] * 4


@pytest.mark.parametrize(("degree", "devices"), [(2, (0, 1, 2, 3)), (4, (0, 1, 2, 3)), (2, (2, 3))])
def test_a_device_is_lost_while_a_merge_waits_for_steps(
    idle: LLM, monkeypatch: pytest.MonkeyPatch, degree: int, devices: tuple[int, ...]
):
    """The caller gets an error. The other instances of the merge start requests as before."""
    asked = requests(8, max_tokens=32)
    expected = tokens(idle.generate(*asked))
    running = decoding(idle, 8, asked, tp=1)[0]

    def no_memory(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    def drive() -> Future[Any]:
        engine = engine_of(idle)
        engine.advance()
        instances = engine.instances
        assert all(instance.pending for instance in instances)
        future = engine.transform(TransformOptions(degree, devices))
        assert engine.instances == instances, "it waits for their steps"
        with monkeypatch.context() as patch:
            patch.setattr(Cluster, "rebuild", no_memory)
            patch.setattr(Cluster, "_make_again", lambda *_: "no memory")
            engine.steps.recover(instances[3], RuntimeError("injected"))
        assert engine.instances == instances[:3]
        engine.cluster._next_revival_s = math.inf  # not before the caller gets the error
        return future

    future = in_dispatcher(idle, drive)
    with pytest.raises(TransformError, match=r"out of service.*devices \[3\]"):
        future.result(TIMEOUT_S)
    assert not any(lane.closed for instance in engine_of(idle).instances for lane in instance.lanes)
    assert {view.phase for view in idle.instances} == {"serving"}
    revive(idle)
    assert tokens(running.result()) == expected


@pytest.mark.slow
def test_an_instance_on_two_devices_returns_to_its_start_placement(
    tmp_path_factory: pytest.TempPathFactory, compile_cache: str
):
    """Before, one layer was replicated, and layers had migrated to an empty device."""
    config = tiny_config("llama2") | {"num_hidden_layers": 4}
    directory = write_model(config, tmp_path_factory.mktemp("four-layers"))
    stages = [{"layers": [0, 2], "homes": [[0]]}, {"layers": [2, 4], "homes": [[1]]}]
    placement = {"head": [0], "stages": stages}
    with make(directory, compile_cache, device_memory="16MiB", **SHARED, placement=placement) as llm:
        asked = requests(4, max_tokens=32)
        before, expected = booked(llm), tokens(llm.generate(*asked))
        llm.replicate(range(0, 1), 1)
        llm.migrate(range(2, 4), 2)
        running = Background(llm, *asked)
        wait_until_decoding(llm, 2)
        lose(llm, (0,))
        assert llm.instances == ()
        revive(llm)
        assert tokens(running.result()) == expected
        assert str(llm.placement()) == "0-1: TP1[0]   2-3: TP1[1]"
        assert booked(llm) == before
        check_idle(llm)
