"""Placement changes in the simulator: costs and capacities by hand, refusals, and no lost request."""

import dataclasses
import random

import numpy as np
import pytest
from shapes import config

from serving.scheduler import (
    Action,
    AmoebaConfig,
    ClusterView,
    CocoServeConfig,
    Dispatch,
    Evict,
    LimitBatch,
    Migrate,
    Offload,
    Replicate,
    ScaleIn,
    ScaleOut,
    ScaleUp,
    StaticPolicy,
    WaitingRequest,
)
from serving.scheduler.cocoserve.speedup import even_speedup
from serving.simulator.event_loop import Cluster, LoopConfig
from serving.simulator.faults import DeviceFault, Faults
from serving.simulator.host_config import HostConfig, Waiting
from serving.simulator.instance import SimInstance
from serving.simulator.requests import RequestTable
from serving.simulator.router import OneHost
from serving.simulator.setups import make_setup
from serving.simulator.sim_executor import SimExecutor
from serving.simulator.simulate import report, request_table, save_report, simulate
from serving.simulator.spread import Spread
from serving.simulator.step_cost import StepShape
from serving.simulator.tally import Ending, Records, Tally

LAYERS = 64


def host(instances: int = 1, **fields) -> HostConfig:
    """Return Qwen2.5-32B on four H200, with instances on the first devices."""
    setup = make_setup(config(num_devices=4, device="H200", instances_at_start=instances), "cocoserve")
    return dataclasses.replace(setup.host, **fields)


class Scripted:
    """A policy that dispatches like `static` and requests given actions at given times."""

    name = "scripted"

    def __init__(self, script: dict[float, list[Action]]):
        self.script, self.static = dict(script), StaticPolicy()
        self.views: list[ClusterView] = []

    def decide(self, view: ClusterView) -> list[Action]:
        self.views.append(view)
        due = [at_s for at_s in self.script if at_s <= view.now_s]
        return [*(a for at_s in due for a in self.script.pop(at_s)), *self.static.decide(view)]


def table(count: int = 40, every_s: float = 0.5, prompt: int = 400, output: int = 300) -> RequestTable:
    times = np.arange(count) * every_s
    lengths = np.full(count, prompt), np.full(count, output), np.full(count, output)
    return RequestTable(times, *lengths, np.zeros(count, int))


class Run:
    """A run of a script on a host until all requests end."""

    def __init__(self, script: dict[float, list[Action]], requests: RequestTable | None = None, **fields):
        self.policy = Scripted(script)
        self.cluster = Cluster([(host(**fields), lambda: self.policy)], requests or table(), OneHost(), keep_log=True)
        self.cluster.run(LoopConfig(drain_s=600))

    @property
    def executor(self) -> SimExecutor:
        return self.cluster.hosts[0].executor

    @property
    def changes(self) -> list[Action]:
        return [action for _, action in self.executor.log if not isinstance(action, Dispatch)]

    @property
    def refused(self) -> int:
        return self.cluster.hosts[0].scheduler.counters.refused

    def check_nothing_lost(self) -> None:
        """Check that all requests completed with all their tokens and without recomputation."""
        records, requests = self.cluster.records, self.cluster.requests
        assert all(ending == Ending.COMPLETED for ending in records.ending)
        assert self.cluster.tally.generated_tokens == requests.output_len.sum()
        assert not any(records.preemptions)


# Costs and capacity


def executor(*placed: Replicate | Migrate, instances: int = 1) -> SimExecutor:
    return SimExecutor(host(instances, placed_at_start=placed), Records(100), Tally(1.0), lambda instance, end_s: None)


def spread_of(instance: SimInstance) -> Spread:
    assert instance.spread is not None
    return instance.spread


def test_step_over_replicated_layers_takes_the_time_of_equation_4():
    """Step times grow with the batch, and 20 of 64 layers are on two devices."""
    made = executor(Replicate(0, (10, 30), 1))
    spread, pricing = spread_of(made.instances[0]), made.config.pricing
    whole, half = (pricing.fixed_s(1, StepShape(rows)) + pricing.context_s(1) * rows * 1000 for rows in (64, 32))
    found = spread.step_s(pricing, StepShape(64), 64_000, 0.0, {})
    hops_s = 2 * spread.cost.hop_s(64)
    assert found == pytest.approx((44 * whole + 20 * half) / LAYERS + hops_s)
    assert spread.transitions == 2
    assert whole / found < even_speedup([2] * 20 + [1] * 44, 2, 0.0), "weights are read on both devices"


def test_step_waits_for_instances_on_the_same_device():
    made = executor(Replicate(0, (0, 32), 1), instances=2)
    one, two = made.instances
    assert two.spread is not None
    assert two.spread.is_home
    pricing, shape = made.config.pricing, StepShape(8)
    alone = spread_of(one).step_s(pricing, shape, 0.0, 0.0, {})
    crowded = spread_of(one).step_s(pricing, shape, 0.0, 0.0, {0: 1.0, 1: 2.0})
    assert crowded == pytest.approx(1.5 * alone, rel=0.02), "half of the layers take twice as long"


def test_capacity_is_the_fullest_device_and_grows_with_replicas_and_migrations():
    base = executor().instances[0].capacity_tokens
    cost = executor().config.layers
    assert cost is not None
    sizes = cost.sizes
    pool = cost.device_bytes - sizes.other_bytes - LAYERS * sizes.weight_bytes
    assert base == pytest.approx(pool / (LAYERS * sizes.kv_token_bytes), abs=16)
    replicated = executor(Replicate(0, (0, 32), 1)).instances[0].capacity_tokens
    assert replicated == pytest.approx(pool / (48 * sizes.kv_token_bytes), abs=16)
    migrated = executor(Migrate(0, (48, 64), 1)).instances[0].capacity_tokens
    assert migrated == pytest.approx((pool + 16 * sizes.weight_bytes) / (48 * sizes.kv_token_bytes), abs=16)
    caches = executor(Migrate(0, (48, 64), 1, modules="kv")).instances[0].capacity_tokens
    assert caches == pytest.approx(pool / (48 * sizes.kv_token_bytes), abs=16), "the weights stay"
    ffns = executor(Migrate(0, (48, 64), 1, modules="ffn")).instances[0].capacity_tokens
    assert ffns == pytest.approx((pool + 16 * sizes.ffn_bytes) / (64 * sizes.kv_token_bytes), abs=16)


def test_guests_use_the_memory_of_their_host():
    made = executor(Replicate(1, (0, 64), 0), instances=2)
    view = made.snapshot()
    assert view.instances[0].capacity_tokens == executor().instances[0].capacity_tokens
    before = view.instances[0].free_tokens
    request = WaitingRequest("guest", 16_000, 16_100)
    made.queue["guest"] = Waiting(request, 0, 100, 0.0)
    assert made.apply(Dispatch("guest", 1)).accepted
    after = made.snapshot()
    assert before - after.instances[0].free_tokens == 8_000, "half of each layer's cache"
    assert after.instances[1].free_tokens == pytest.approx(view.instances[1].free_tokens - 16_000, abs=16)
    assert after.devices[0].free_bytes < view.devices[0].free_bytes


# Changes while requests run


def test_replicas_come_and_go_and_all_is_as_before():
    run = Run({3.0: [Replicate(0, (5, 25), 1)], 12.0: [Evict(0, (5, 25), 1)]})
    run.check_nothing_lost()
    assert [type(a) for a in run.changes] == [Replicate, Evict]
    placements = [view.instances[0].placement for view in run.policy.views]
    middle = next(p for p in placements if p is not None and len(p.attention[24]) == 2)
    assert middle.attention == ((0,),) * 5 + ((0, 1),) * 20 + ((0,),) * 39
    assert any(p is not None and len(p.attention[5]) == 2 and len(p.attention[24]) == 1 for p in placements), (
        "by groups"
    )
    last = run.policy.views[-1]
    assert last.instances[0].placement is None
    assert last.instances[0].capacity_tokens == run.policy.views[0].instances[0].capacity_tokens
    assert last.devices[1].free_bytes == last.devices[1].memory_bytes == run.policy.views[0].devices[1].memory_bytes


def test_copies_take_the_time_of_their_bytes_on_the_link():
    run = Run({3.0: [Replicate(0, (0, 32), 1)]})
    cost = run.executor.config.layers
    assert cost is not None
    seconds = [v.now_s for v in run.policy.views if v.instances[0].changes_placement]
    expected_s = 32 * (cost.sizes.weight_bytes / cost.link_rate + cost.launch_s)
    assert run.cluster.tally.weight_bytes == pytest.approx(32 * cost.sizes.weight_bytes)
    assert seconds[-1] - 3.0 == pytest.approx(expected_s, abs=1.1), "a decision at least once a second"
    shared = Run({3.0: [Replicate(0, (0, 32), 1)]}, instances=2)
    assert shared.cluster.tally.weight_bytes == 0, "the device has the weights"


@pytest.mark.parametrize("modules", ["layer", "attention", "ffn", "kv"])
def test_migrated_modules_serve_elsewhere_and_return(modules):
    run = Run({3.0: [Migrate(0, (50, 64), 2, modules=modules)], 10.0: [Migrate(0, (50, 64), 0, modules=modules)]})
    run.check_nothing_lost()
    assert run.refused == 0
    assert any(v.instances[0].placement is not None for v in run.policy.views)
    assert run.policy.views[-1].instances[0].placement is None


def test_scale_out_serves_before_all_layers_have_come_and_ends_as_an_instance():
    run = Run({5.0: [ScaleOut(0, 3)]})
    run.check_nothing_lost()
    partly = [v for v in run.policy.views if len(v.instances) == 1 and v.instances[0].placement is not None]
    assert any(3 in v.instances[0].placement.devices for v in partly if v.instances[0].placement)
    end = next(v for v in run.policy.views if len(v.instances) == 2)
    one, two = end.instances
    assert (one.id, two.id, one.placement, two.placement) == (0, 3, None, None)
    assert abs(len(one.running) - len(two.running)) <= 1, "each keeps its microbatch"
    assert two.capacity_tokens == one.capacity_tokens


def test_scale_in_moves_the_sequences_and_empties_the_device():
    run = Run({6.0: [ScaleIn(0, 1)]}, instances=2)
    run.check_nothing_lost()
    assert [i.id for i in run.policy.views[-1].instances] == [0]
    last = run.policy.views[-1]
    assert last.devices[1].free_bytes == last.devices[1].memory_bytes


def test_offloaded_requests_continue_without_recomputation():
    """They wait until the instance has free slots again."""
    run = Run({4.0: [LimitBatch(0, 2), *(Offload(f"r{n}") for n in range(2, 8))], 8.0: [LimitBatch(0, None)]})
    run.check_nothing_lost()
    views = run.policy.views
    offloaded = [r for v in views for r in v.queue if r.offloaded]
    assert {r.request_id for r in offloaded} == {f"r{n}" for n in range(2, 8)}
    assert all(r.prompt_tokens > 400 for r in offloaded), "their tokens so far"
    assert run.cluster.tally.prompt_tokens == run.cluster.requests.input_len.sum()
    limited = [v.instances[0] for v in views if v.instances[0].batch_limit is not None]
    assert limited
    assert all(i.batch_limit == 2 for i in limited)


def test_device_failure_loses_no_request():
    policy = Scripted({2.0: [Replicate(0, (0, 20), 1)]})
    faults = Faults(devices=(DeviceFault(1, 8.0, 1.0), DeviceFault(2, 9.0, 1.0)))
    cluster = Cluster([(host(1), lambda: policy)], table(), OneHost(), faults)
    cluster.run(LoopConfig(drain_s=600))
    assert all(ending == Ending.COMPLETED for ending in cluster.records.ending)
    assert any(cluster.records.preemptions), "those that ran at the first failure; device 2 is empty"


# Refusals


def outcome(made: SimExecutor, action: Action) -> str:
    before = made.snapshot()
    answer = made.apply(action)
    assert not answer.accepted
    after = made.snapshot()
    assert (before.instances, before.devices) == (after.instances, after.devices)
    return answer.detail


def test_impossible_changes_are_refused_with_the_reason():
    made = executor(Replicate(0, (0, 10), 1), instances=2)
    assert "there is no instance 3" in outcome(made, Replicate(3, (0, 4), 2))
    assert "layers 60 to 64 do not exist" in outcome(made, Replicate(0, (60, 65), 2))
    assert "layer 9 is on device 1 already" in outcome(made, Replicate(0, (9, 12), 1))
    assert "layer 10 has no replica on device 1" in outcome(made, Evict(0, (0, 11), 1))
    assert "layer 0 is replicated" in outcome(made, Migrate(0, (0, 4), 2))
    assert "device 7 does not exist" in outcome(made, Migrate(0, (20, 24), 7))
    assert "device 1 is not empty" in outcome(made, ScaleOut(1, 1))
    assert "layers of instance 0 are on other devices: evict or migrate them first" in outcome(made, ScaleOut(0, 2))
    assert "cannot receive its own" in outcome(made, ScaleIn(1, 1))
    assert "device 1 computes layers of instance 0" in outcome(made, ScaleIn(0, 1))
    assert "layers of instance 0 are on other devices" in outcome(made, ScaleUp((0, 1), 2))
    assert "modules='head' must be one of" in outcome(made, Replicate(0, (0, 4), 2, modules="head"))  # type: ignore
    assert "layers=(4, 4)" in outcome(made, Replicate(0, (4, 4), 2))
    assert "size=0" in outcome(made, LimitBatch(0, 0))
    assert "no such request" in outcome(made, Offload("nobody"))


def test_changes_in_progress_and_full_devices_are_refused():
    made = executor(instances=2)
    assert made.apply(Replicate(0, (0, 10), 2)).accepted
    assert "a placement change of instance 0 is in progress" in outcome(made, Replicate(0, (20, 24), 3))
    assert "a placement change of instance 0 is in progress" in outcome(made, ScaleUp((0, 1), 2))
    cost = made.config.layers
    assert cost is not None
    small = dataclasses.replace(made.config, layers=dataclasses.replace(cost, device_bytes=60e9))
    made = SimExecutor(small, made.records, made.tally, lambda instance, end_s: None)
    assert "GB free, but the layers need" in outcome(made, ScaleOut(0, 2))


def test_host_without_data_about_layers_refuses():
    made = SimExecutor(host(layers=None), executor().records, executor().tally, lambda instance, end_s: None)
    assert "no data about layers" in outcome(made, Replicate(0, (0, 4), 1))
    assert made.snapshot().layer is None


# The policy


def wave(**fields):
    load = {
        "dataset_name": "burst", "duration_s": 480.0, "low_rate": "0.2:0.2", "high_rate": "6:6", "phase_s": 120.0,
        "random_input_len": 400, "random_output_len": 200,
    }  # fmt: skip
    return config(load, num_devices=4, device="H200", instances_at_start=1, **fields)


def test_square_wave_causes_few_changes_at_its_edges_and_none_between():
    """A phase lasts 120 s. Each rise needs up to three more instances, and each fall ends them."""
    setup, requests = make_setup(wave(), "cocoserve"), request_table(wave())
    cluster = Cluster([(setup.host, setup.make_policy)], requests, OneHost(), keep_log=True)
    cluster.run(LoopConfig(drain_s=600))
    log = [(at_s, a) for at_s, a in cluster.hosts[0].executor.log if not isinstance(a, Dispatch)]
    assert {type(a) for _, a in log} == {ScaleOut, ScaleIn}
    for phase in range(4):
        inside = [(at_s - 120 * phase, a) for at_s, a in log if 120 * phase <= at_s < 120 * (phase + 1)]
        kind = ScaleOut if phase % 2 else ScaleIn
        assert all(isinstance(a, kind) for _, a in inside), "no change is undone in its phase"
        assert len(inside) <= 3
        assert all(at_s < 70 for at_s, _ in inside), "the load is constant later"
    assert sum(isinstance(a, ScaleOut) for _, a in log) >= 2
    assert all(ending == Ending.COMPLETED for ending in cluster.records.ending)


@pytest.mark.parametrize("seed", range(4))
def test_the_host_refuses_nothing_that_the_policy_requests(seed: int):
    """Loads and settings are random, and long requests merge devices. A refusal raises."""
    rng = random.Random(seed)
    load = {
        "dataset_name": "mix", "duration_s": 100.0, "seed": seed, "short_per_minute": rng.choice([60.0, 240.0]),
        "long_per_minute": rng.choice([0.5, 4.0]), "short_output_len": 300, "long_input_len": 30_000,
    }  # fmt: skip
    cocoserve = CocoServeConfig(
        0.3, window_s=1.0, cool_down_s=2.0, split_batch=rng.choice([2, 4]), scale_out=rng.random() < 0.5
    )
    slos = AmoebaConfig(ttft_slo_s=2.0, tpot_slo_s=rng.choice([0.02, 0.1]))
    start = rng.choice([1, 2, 3, None])
    settings = config(load, num_devices=4, instances_at_start=start, policy_config=slos, cocoserve_config=cocoserve)
    setup, requests = make_setup(settings, "cocoserve"), request_table(settings)
    made = dataclasses.replace(setup.host, strict=True)
    cluster = Cluster([(made, setup.make_policy)], requests, OneHost(), keep_log=True)
    cluster.run(LoopConfig(drain_s=1500))
    assert all(ending == Ending.COMPLETED for ending in cluster.records.ending)
    assert {type(a) for _, a in cluster.hosts[0].executor.log} - {Dispatch}, "something changed"


def test_constant_overload_ends_in_a_state_without_changes():
    """No placement meets the SLO. Each instance tries one smaller batch, and then nothing changes."""
    load = {"dataset_name": "random", "duration_s": 400.0, "request_rate": 4.0, "random_output_len": 300}
    settings = config(load, num_devices=2, device="H200", policy_config=AmoebaConfig(tpot_slo_s=1e-3))
    setup, requests = make_setup(settings, "cocoserve"), request_table(settings)
    cluster = Cluster([(setup.host, setup.make_policy)], requests, OneHost(), keep_log=True)
    cluster.run(LoopConfig(drain_s=600))
    times = [at_s for at_s, a in cluster.hosts[0].executor.log if not isinstance(a, Dispatch | Offload)]
    assert 1 <= len(times) <= 8
    assert not [at_s for at_s in times if 150 < at_s < 400]


def test_replicas_leave_before_a_long_request_merges_their_devices():
    """The merged instance then serves the request. Without this policy, the host refuses the merge."""
    setup = make_setup(config(num_devices=2), "cocoserve")
    capacity = setup.host.limits[0].capacity_tokens
    placed = Replicate(0, (0, 20), 1), Migrate(1, (60, 64), 0)
    made = dataclasses.replace(setup.host, placed_at_start=placed)
    one = RequestTable(*(np.array([value]) for value in (1.0, capacity * 2, 50, 50)), np.zeros(1, int))
    cluster = Cluster([(made, setup.make_policy)], one, OneHost(), keep_log=True)
    cluster.run(LoopConfig(drain_s=600))
    assert cluster.records.ending[0] == Ending.COMPLETED
    log = [a for _, a in cluster.hosts[0].executor.log]
    assert [type(a) for a in log[:4]] == [Evict, Migrate, ScaleUp, Dispatch]
    assert "before devices 0-1 merge" in log[0].reason


def test_equal_seeds_give_equal_bytes(tmp_path):
    settings = wave(cocoserve_config=CocoServeConfig(scale_out=False))
    for name in ("one", "two"):
        save_report(report(settings, {"cocoserve": simulate(settings, "cocoserve")}), tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
