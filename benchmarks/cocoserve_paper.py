"""Simulations of CoCoServe's sections 3 and 6 for `papers.py`: Llama-2-13B on A100-40 with PCIe.

The paper's request rates, up to 50 a second with 256 tokens each, are above what four A100 generate. Figures 6 and 10
are therefore simulated as bursts of so many requests in one second, and Figure 11 as lower rates for minutes.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np

from serving.bench.workload import WorkloadConfig
from serving.scheduler import AmoebaConfig, CocoServeConfig, Replicate
from serving.scheduler.cocoserve.speedup import even_speedup
from serving.simulator.device_spec import DeviceSpec, find_device
from serving.simulator.event_loop import Cluster, LoopConfig
from serving.simulator.memory import MemoryPlan
from serving.simulator.model_shape import ModelShape
from serving.simulator.result import PolicyResult, collect
from serving.simulator.router import OneHost
from serving.simulator.settings import SimulationConfig
from serving.simulator.setups import layer_cost, make_setup
from serving.simulator.simulate import request_table
from serving.simulator.slo import Slo
from serving.simulator.tally import Ending

PROMPT, OUTPUT, SPREAD = 64, 200, 0.28
"""Mean prompt and output tokens, and spread of both: Alpaca with at most 256 tokens. Not stated in the paper."""
BATCH, HOST_S = 15, 0.036
"""Requests that fit one device ("a fixed batch size of 15 requests", 3.1), and seconds of host work in a step of the
baseline, Hugging Face Transformers, fitted to its mean latency at 50 requests, 20 s (Figure 6b)."""
SLO = Slo(10.0, 0.1)
"""Limits of `amoeba`'s defaults. The paper states none."""
LAYERS = 40
FIGURE_6 = {
    "15 layers": (15, 2, 1.4507),
    "20 layers": (20, 2, 1.9080),
    "25 layers": (25, 2, 2.9310),
    "30 layers": (30, 2, 4.2942),
    "20 layers, p = 4": (20, 4, 2.6368),
}
"""Replicated layers, homes of each layer, and throughput at 50 requests relative to the baseline (15 layers: mean of
all loads)."""
REPLICATED = 8
"""Replicated layers in Figure 10: 64,015 MiB less 58,787 MiB are 8.6 layers."""
DURATION_S = 240.0
"""Seconds of arrivals for Figure 11."""


def device() -> DeviceSpec:
    """Return an A100-40 that is connected by PCIe 4.0."""
    return replace(find_device("A100-40"), link_bandwidth=25e9, link_efficiency=0.8, step_overhead_s=HOST_S)


def activation_gb(model: ModelShape) -> float:
    """Return the temporaries that leave KV cache for `BATCH` requests on one device, in GB."""
    free = MemoryPlan(model, device(), activation_bytes=0.0).capacity_tokens(1) - BATCH * (PROMPT + OUTPUT)
    return free * model.kv_token_bytes() / 1e9


def serve(
    model: ModelShape,
    policy: str,
    rate: float,
    instances: int,
    num_devices: int = 4,
    placed: tuple[Replicate, ...] = (),
    duration_s: float | None = None,
    deadline_s: float | None = None,
    seed: int = 0,
) -> PolicyResult:
    """Simulate one policy.

    Args:
        rate: requests per second.
        instances: number of instances at the start, on the first devices.
        placed: replicas at the start.
        duration_s: seconds in which requests arrive. None: a burst of `rate` requests.
        deadline_s: seconds after which a request fails.
    """
    load = WorkloadConfig(
        dataset_name="random", duration_s=duration_s, num_prompts=round(rate) if duration_s is None else None,
        request_rate=rate, random_input_len=PROMPT, random_output_len=OUTPUT, random_range_ratio=SPREAD, seed=seed,
    )  # fmt: skip
    config = SimulationConfig(
        model, load, device(), num_devices, degrees=(1,), instances_at_start=instances, slo=SLO, max_num_seqs=256,
        activation_gb=activation_gb(model), deadline_s=deadline_s, devices_per_scheduler=num_devices,
        policy_config=AmoebaConfig(ttft_slo_s=SLO.ttft_s, tpot_slo_s=SLO.tpot_s),
        cocoserve_config=CocoServeConfig(scale_out=False),
    )  # fmt: skip
    setup, table = make_setup(config, policy), request_table(config)
    memory = MemoryPlan(model, device(), activation_bytes=activation_gb(model) * 1e9)
    host = replace(setup.host, layers=layer_cost(memory, setup.host.pricing.cost), placed_at_start=placed)
    cluster = Cluster([(host, setup.make_policy)], table, OneHost())
    cluster.run(LoopConfig())
    return collect(policy, cluster, SLO, num_devices)


def burst(
    model: ModelShape, count: int, instances: int, placed: tuple[Replicate, ...], seeds: int
) -> tuple[float, float]:
    """Return tokens per second and mean latency in seconds of a burst without a scaling policy, means over seeds."""
    runs = [serve(model, "static-tp1", count, instances, placed=placed, seed=seed) for seed in range(seeds)]
    latencies = [float(np.nanmean(run.e2el_s)) for run in runs]
    return float(np.mean([run.output_throughput for run in runs])), float(np.mean(latencies))


def figure_6(model: ModelShape, seeds: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield name, published value, value of Equation 4 without communication, and simulated value.

    The first row is the mean latency of the baseline in seconds. Other rows are throughputs relative to the baseline.
    """
    base, base_s = burst(model, 50, 1, (), seeds)
    yield "baseline: mean latency at 50 requests (s)", 20.0, math.nan, base_s
    for name, (layers, homes, paper) in FIGURE_6.items():
        placed = tuple(Replicate(0, (0, layers), target) for target in range(1, homes))
        found, _ = burst(model, 50, 1, placed, seeds)
        ideal = even_speedup([homes] * layers + [1] * (LAYERS - layers), 2, 0.0)
        yield f"{name}: throughput over the baseline", paper, ideal, found / base


def figure_10(model: ModelShape, seeds: int) -> Iterator[tuple[str, float, float, float, float]]:
    """Yield load, published and simulated throughput of two instances with replicas over two instances without, and
    published and simulated latency likewise.

    The number of requests is fitted: four instances then generate as much more than two as in the paper.
    """
    placed = Replicate(0, (0, REPLICATED // 2), 2), Replicate(1, (0, REPLICATED // 2), 3)
    for load, more, less, lead in (("low", 1.1692, 0.8577, 1.2814), ("high", 1.3878, 0.7252, 1.5813)):
        pairs = {n: (burst(model, n, 2, (), seeds), burst(model, n, 4, (), seeds)) for n in range(40, 85, 4)}
        count = min(pairs, key=lambda n: abs(pairs[n][1][0] / pairs[n][0][0] - lead))
        (two, two_s), (found, found_s) = pairs[count][0], burst(model, count, 2, placed, seeds)
        yield load, more, found / two, less, found_s / two_s


def memory_ratio(model: ModelShape) -> float:
    """Return the memory of two instances with replicas relative to two instances: 58,787 MiB in the paper."""
    layer_bytes = model.attention_bytes + model.ffn_bytes / model.num_layers
    return 1 + REPLICATED * layer_bytes / (58786.68 * 2**20)


@cache
def knee(model: ModelShape, policy: str, num_devices: int, share: float = 0.9) -> float:
    """Return the requests per second up to which `share` of the requests meet the limits, within 2%."""
    low, high = 0.5, 16.0
    while high > 1.02 * low:
        rate = (low * high) ** 0.5
        kept = serve(model, policy, rate, 1, num_devices, duration_s=DURATION_S).kept_share
        low, high = (rate, high) if kept >= share else (low, rate)
    return low


def failed(model: ModelShape, policy: str, num_devices: int, rate: float, deadline_s: float) -> float:
    """Return the share of requests that miss a deadline, in %."""
    run = serve(model, policy, rate, 1, num_devices, duration_s=DURATION_S, deadline_s=deadline_s)
    return 100 * float((run.ending == Ending.DEADLINE).mean())


def figure_11(model: ModelShape) -> Iterator[tuple[str, float, float, bool]]:
    """Yield name, published value, simulated value, and whether it was fitted.

    Fitted are the requests per second that count as 25 of the paper, so that the baseline has its knee there, and a
    deadline, so that 34% of its requests fail at 55. On one device the baseline serves; the replicas of `cocoserve` use
    one or three further devices.
    """
    unit = knee(model, "static-tp1", 1) / 25
    yield "baseline: attainment falls below 90% (requests/s)", 25.0, 25.0, True
    yield "baseline: attainment falls below 10% (requests/s)", 30.0, knee(model, "static-tp1", 1, 0.1) / unit, False
    deadline_s = _deadline_s(model, 55 * unit)
    lost = failed(model, "static-tp1", 1, 55 * unit, deadline_s)
    yield "baseline: failed requests at 55 requests/s (%)", 34.0, lost, True
    for devices in (2, 4):
        found = knee(model, "cocoserve", devices) / unit
        yield f"cocoserve on {devices} devices: attainment falls below 90% (requests/s)", 50.0, found, False
        lost = failed(model, "cocoserve", devices, 55 * unit, deadline_s)
        yield f"cocoserve on {devices} devices: failed requests at 55 requests/s (%)", 2.0, lost, False


def _deadline_s(model: ModelShape, rate: float) -> float:
    """Return the deadline in seconds that 34% of the baseline's requests miss."""
    low, high = 10.0, 2 * DURATION_S
    while high > low + 2:
        middle = (low + high) / 2
        late = failed(model, "static-tp1", 1, rate, middle) > 34
        low, high = (middle, high) if late else (low, middle)
    return low
