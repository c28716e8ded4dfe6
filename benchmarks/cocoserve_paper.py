"""Simulations of sections 3 and 6 of the CoCoServe paper, for `papers.py`: Llama-2-13B on A100-40 with PCIe.

The paper states up to 50 requests a second, with 256 tokens each. Four A100 cannot generate that many tokens. For
Figures 6 and 10, a rate of 50 is therefore simulated as a burst of 50 requests in one second. For Figure 11, lower
rates are simulated for minutes.
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
    """Return an A100-40 with PCIe 4.0, and with the host time of the baseline in each step (`HOST_S`)."""
    return replace(find_device("A100-40"), link_bandwidth=25e9, link_efficiency=0.8, step_overhead_s=HOST_S)


def activation_gb(model: ModelShape) -> float:
    """Return the GB of temporaries on a device with which its KV cache holds `BATCH` requests."""
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
        placed: layers that are replicated at the start.
        duration_s: seconds in which requests arrive. None: a burst of `rate` requests in one second.
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
    """Simulate a burst of requests with fixed replicas. Return (tokens/s, mean latency in s), averaged over seeds."""
    runs = [serve(model, "static-tp1", count, instances, placed=placed, seed=seed) for seed in range(seeds)]
    latencies = [float(np.nanmean(run.e2el_s)) for run in runs]
    return float(np.mean([run.output_throughput for run in runs])), float(np.mean(latencies))


def figure_6(model: ModelShape, seeds: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield rows of Figure 6: (name, published value, value of Equation 4 without communication, simulated value).

    The first row is the mean latency of the baseline in seconds. It has no value of Equation 4 (NaN). Other rows are
    throughputs divided by the throughput of the baseline.
    """
    base, base_s = burst(model, 50, 1, (), seeds)
    yield "baseline: mean latency at 50 requests (s)", 20.0, math.nan, base_s
    for name, (layers, homes, paper) in FIGURE_6.items():
        placed = tuple(Replicate(0, (0, layers), target) for target in range(1, homes))
        found, _ = burst(model, 50, 1, placed, seeds)
        ideal = even_speedup([homes] * layers + [1] * (LAYERS - layers), 2, 0.0)
        yield f"{name}: throughput over the baseline", paper, ideal, found / base


def figure_10(model: ModelShape, seeds: int) -> Iterator[tuple[str, float, float, float, float]]:
    """Yield rows: (load, published throughput, simulated throughput, published latency, simulated latency).

    Each value is the figure of two instances with replicas, divided by the figure without replicas. The number of
    requests is fitted to the paper's ratio between the throughputs of four and of two instances.
    """
    placed = Replicate(0, (0, REPLICATED // 2), 2), Replicate(1, (0, REPLICATED // 2), 3)
    for load, more, less, lead in (("low", 1.1692, 0.8577, 1.2814), ("high", 1.3878, 0.7252, 1.5813)):
        pairs = {n: (burst(model, n, 2, (), seeds), burst(model, n, 4, (), seeds)) for n in range(40, 85, 4)}
        count = min(pairs, key=lambda n: abs(pairs[n][1][0] / pairs[n][0][0] - lead))
        (two, two_s), (found, found_s) = pairs[count][0], burst(model, count, 2, placed, seeds)
        yield load, more, found / two, less, found_s / two_s


def memory_ratio(model: ModelShape) -> float:
    """Return the memory of two instances with replicas over the memory without replicas (58,787 MiB in the paper)."""
    layer_bytes = model.attention_bytes + model.ffn_bytes / model.num_layers
    return 1 + REPLICATED * layer_bytes / (58786.68 * 2**20)


@cache
def knee(model: ModelShape, policy: str, num_devices: int, share: float = 0.9) -> float:
    """Return the highest rate in requests per second, within 2%, at which `share` of the requests meet the limits
    `SLO`."""
    low, high = 0.5, 16.0
    while high > 1.02 * low:
        rate = (low * high) ** 0.5
        kept = serve(model, policy, rate, 1, num_devices, duration_s=DURATION_S).kept_share
        low, high = (rate, high) if kept >= share else (low, rate)
    return low


def failed(model: ModelShape, policy: str, num_devices: int, rate: float, deadline_s: float) -> float:
    """Return the percentage of requests that miss a deadline."""
    run = serve(model, policy, rate, 1, num_devices, duration_s=DURATION_S, deadline_s=deadline_s)
    return 100 * float((run.ending == Ending.DEADLINE).mean())


def figure_11(model: ModelShape) -> Iterator[tuple[str, float, float, bool]]:
    """Yield rows of Figure 11: (name, published value, simulated value, whether the simulated value is fitted).

    Two values are fitted to the baseline, which runs on one device. The highest rate at which 90% of its requests meet
    the limits counts as 25 requests/s, as in the paper. The deadline makes 34% of its requests fail at 55 requests/s.
    The policy `cocoserve` gets one or three further devices for replicas.
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
