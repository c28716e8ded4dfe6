"""Simulations of Flying Serving's section 6 for `papers.py`: Llama-3-70B on 8 H200."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from serving.bench.workload import WorkloadConfig
from serving.scheduler import FlyingConfig
from serving.simulator.device_spec import DeviceSpec, find_device
from serving.simulator.event_loop import Cluster, LoopConfig
from serving.simulator.model_shape import ModelShape
from serving.simulator.result import PolicyResult, collect
from serving.simulator.router import make_router
from serving.simulator.settings import SimulationConfig
from serving.simulator.setups import make_setup
from serving.simulator.simulate import request_table
from serving.simulator.slo import Slo

MAX_NUM_SEQS, PHASE_S = 64, 30.0
"""Maximum running requests of an instance at any degree (as in vLLM), and seconds of a phase.

64 requests are enough for static TP's peak in Table 1: 2,530 tokens/s at 22 ms for each token need 56 running requests.
"""
LOW, HIGH = "2:5", "10:30"
"""Ranges of requests per second in low and in high phases (6.1.3)."""
BURSTS, PRIORITIES, LONGEST = (1500, 100), (1024, 600), (7900, 200)
"""Mean prompt tokens and mean output tokens of three loads.

Lengths vary from 0.5 to 1.5 times the mean; the paper does not state the ranges (6.1.3). The means of `BURSTS` are
fitted to static DP's TTFT in bursts in Figure 8, as a mean of seeds 0 to 2: 4.22 s (paper 4.23 s). Bursts are near
overload, and each phase draws its rate, so single seeds have 1.8 to 5.6 s. The peak is 7% above Figure 9. The means of
`PRIORITIES` are fitted to the peaks of static TP and static DP in Table 1. `LONGEST` is the longest context of the
model (6.5).
"""
FITTED = ("peak tokens/s",)
"""Rows of Table 1 to which the lengths were fitted, for static policies."""
TEXT = {
    "static-tp8": (22.0, 22.0, 63.0, 2130.0, 2530.0),
    "static-tp2": (32.0, 32.0, 166.0, 166.0, 3164.0),
    "flying": (24.0, 28.0, 74.0, 142.0, 3040.0),
}
"""Values of Table 1 by policy.

The order is mean TPOT of priority requests, mean TPOT of all requests, mean TTFT of priority requests, mean TTFT of all
requests (times in ms), and peak tokens/s.
"""


HOST_S = 0.0052
"""Host work in each step, fitted to the mean TPOT of static DP in Table 1 (32 ms)."""


def device() -> DeviceSpec:
    """Return an H200 with the host time of the paper's engine (vLLM in eager mode): the host launches each operator."""
    h200 = find_device("H200")
    return replace(h200, kernel_s=h200.launch_s, step_overhead_s=HOST_S)


@dataclass(frozen=True)
class Served:
    """Result of one simulated policy, and figures computed from it."""

    result: PolicyResult

    def ttft_ms(self, rows: np.ndarray | None = None) -> float:
        """Return the mean TTFT in ms. `rows`: mask of the requests that count; None: all requests."""
        return float(np.nanmean(self.result.ttft_s if rows is None else self.result.ttft_s[rows])) * 1e3

    def tpot_ms(self, rows: np.ndarray | None = None) -> float:
        """Return the mean TPOT in ms. `rows`: mask of the requests that count; None: all requests."""
        return float(np.nanmean(self.result.tpot_s if rows is None else self.result.tpot_s[rows])) * 1e3

    def urgent(self) -> np.ndarray:
        """Return a mask of the urgent requests: those with a negative priority."""
        priority = self.result.requests.priority
        assert priority is not None, "some are"
        return priority < 0

    def in_phase(self, kind: str) -> np.ndarray:
        """Return a mask of the requests that arrived in a phase of `kind` (`low` or `high`)."""
        number = self.result.requests.arrival_s // PHASE_S % 2
        return number == ("low", "high").index(kind)

    def peak(self, window_s: float = 5.0) -> float:
        """Return the maximum rate of generated tokens per second in any `window_s` seconds."""
        tally = self.result.tally
        width = max(round(window_s / tally.bin_s), 1)
        sums = np.convolve(tally.tokens_per_bin, np.ones(width), "valid")
        return float(sums.max()) / (width * tally.bin_s)


def serve(
    model: ModelShape,
    policy: str,
    low: str,
    high: str,
    lengths: tuple[int, int],
    urgent_share: float = 0.0,
    seed: int = 0,
    duration_s: float = 300.0,
    flying: FlyingConfig | None = None,
) -> Served:
    """Simulate one policy under a load in which low and high phases of 30 s alternate.

    Args:
        low: range of requests per second in low phases, such as "2:5".
        high: range of requests per second in high phases.
        lengths: mean prompt tokens and mean output tokens.
        urgent_share: share of requests with priority -1.
    """
    load = WorkloadConfig(
        dataset_name="burst", duration_s=duration_s, low_rate=low, high_rate=high, phase_s=PHASE_S, seed=seed,
        random_input_len=lengths[0], random_output_len=lengths[1], random_range_ratio=0.5,
    )  # fmt: skip
    config = SimulationConfig(
        model, load, device=device(), degrees=(2, 4, 8), max_num_batched_tokens=8192, urgent_share=urgent_share,
        layers_per_step=20, seed=seed, flying_config=flying or FlyingConfig(),
    )  # fmt: skip
    setup = make_setup(config, policy)
    limits = tuple(replace(limit, max_requests=MAX_NUM_SEQS) for limit in setup.host.limits)
    table = request_table(config)
    host = replace(setup.host, limits=limits)
    cluster = Cluster(
        [(host, setup.make_policy)], table, make_router("round_robin", [1.0], seed, len(table)), bin_s=1.0
    )
    cluster.run(LoopConfig(drain_s=3600.0))
    return Served(collect(policy, cluster, Slo(), config.num_devices))


def table_1(model: ModelShape, policy: str, seeds: int) -> tuple[float, ...]:
    """Return the simulated values of Table 1 for one policy, averaged over seeds.

    In this order: TPOT of urgent requests, TPOT of all requests, TTFT of urgent requests, TTFT of all requests (means
    in ms), and peak tokens/s. With the policy `flying`, urgent requests get half of the devices.
    """
    flying, found = FlyingConfig(urgent_degree=4), []
    for seed in range(seeds):
        served = serve(model, policy, "3:5", "3:5", PRIORITIES, 0.2, seed, flying=flying)
        urgent = served.urgent()
        latencies = served.tpot_ms(urgent), served.tpot_ms(), served.ttft_ms(urgent), served.ttft_ms()
        found.append((*latencies, served.peak()))
    return tuple(np.mean(found, axis=0))


def figure_8(model: ModelShape, policy: str, seeds: int) -> tuple[float, float, float, float]:
    """Return (mean TTFT, P90 TTFT, mean queue time, peak tokens/s), averaged over seeds.

    The times are in seconds, of requests that arrive in high phases. The peak is that of the whole run.
    """
    found = []
    for seed in range(seeds):
        run = serve(model, policy, LOW, HIGH, BURSTS, seed=seed)
        rows = run.in_phase("high")
        ttft_s, queue_s = run.result.ttft_s[rows], run.result.queue_s[rows]
        found.append((np.nanmean(ttft_s), np.nanpercentile(ttft_s, 90), np.mean(queue_s), run.peak()))
    mean_s, p90_s, waited_s, peak = np.mean(found, axis=0)
    return float(mean_s), float(p90_s), float(waited_s), float(peak)


def light(model: ModelShape, policy: str, seeds: int, rate: str, lengths: tuple[int, int]) -> tuple[float, float]:
    """Simulate a load at one rate. Return the mean TTFT and the mean TPOT in ms, without requests of the first 15 s.

    Args:
        rate: range of requests per second, or one number.
        lengths: mean prompt tokens and mean output tokens.
    """
    found = []
    for seed in range(seeds):
        run = serve(model, policy, rate, rate, lengths, seed=seed)
        rows = run.result.requests.arrival_s > 15
        found.append((run.ttft_ms(rows), run.tpot_ms(rows)))
    ttft_ms, tpot_ms = np.mean(found, axis=0)
    return float(ttft_ms), float(tpot_ms)


def figures(model: ModelShape, seeds: int) -> Iterator[tuple[str, str, float | None, float, bool]]:
    """Yield rows: (table or figure, name, published number, simulated number, whether the simulated one is fitted)."""
    names = (
        "mean TPOT, priority (ms)",
        "mean TPOT (ms)",
        "mean TTFT, priority (ms)",
        "mean TTFT (ms)",
        "peak tokens/s",
    )
    for policy, values in TEXT.items():
        for name, value, found in zip(names, values, table_1(model, policy, seeds), strict=True):
            is_fitted = policy != "flying" and name in FITTED
            yield "Flying Serving Table 1", f"{policy}: {name}", value, float(found), is_fitted
    bursts = {policy: figure_8(model, policy, seeds) for policy in TEXT}
    for policy, burst_s, peak in (("static-tp2", 4.23, 3169.0), ("flying", 4.38, 3059.0)):
        found_s, p90_s, waited_s, found_peak = bursts[policy]
        is_fitted = policy == "static-tp2"
        yield "Flying Serving Figure 8", f"{policy}: mean TTFT in bursts (s)", burst_s, found_s, is_fitted
        yield "Flying Serving Figure 8", f"{policy}: P90 TTFT in bursts (s)", None, p90_s, False
        yield "Flying Serving Figure 8", f"{policy}: mean queue time in bursts (s)", None, waited_s, False
        yield "Flying Serving Figure 9", f"{policy}: peak tokens/s", peak, found_peak, is_fitted
    (_, p90_s, waited_s, _), (_, own_p90_s, own_waited_s, _) = bursts["static-tp8"], bursts["flying"]
    what = "static-tp8 over flying: P90 TTFT in bursts; 'up to' for all models"
    yield "Flying Serving Figure 8", what, 4.79, p90_s / own_p90_s, False
    what = "static-tp8 over flying: mean queue time in bursts"
    yield "Flying Serving Figure 8", what, None, waited_s / own_waited_s, False
    quiet = {policy: light(model, policy, seeds, LOW, BURSTS)[0] for policy in TEXT}
    for policy, ttft_ms in (("static-tp8", 212.0), ("flying", 223.0)):
        yield "Flying Serving 6.2", f"{policy}: mean TTFT, light load (ms)", ttft_ms, quiet[policy], False
    what = "static-tp2 over flying: mean TTFT, light load; 'up to' for all models"
    yield "Flying Serving 6.2", what, 3.47, quiet["static-tp2"] / quiet["flying"], False
    ours, tensor = (light(model, policy, seeds, "0.2", LONGEST)[1] for policy in ("flying", "static-tp8"))
    yield "Flying Serving Figure 10", "ITL over static TP's, longest contexts; at most", 1.05, ours / tensor, False
