"""Tables and figures of papers, with results of the simulator beside the published numbers.

    python benchmarks/papers.py [--seeds 5] [--duration 300] [--quick] [--json papers.json] [--plot region.png]

Each row names the origin of the simulated number:

- exact arithmetic: computed from sizes;
- predicted: computed by a cost model with published data of devices, which is not fitted to the paper;
- calibrated on this row, or on other rows: computed by a cost model that is fitted to numbers of the paper.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import cocoserve_paper
import flying_paper
import numpy as np
import published_mechanisms
from paper_differences import NOT_REPRODUCED, cause
from paper_rows import CALIBRATED, EXACT, PREDICTED, Row
from rich.console import Console
from rich.table import Table

from serving.bench.workload import WorkloadConfig
from serving.simulator.comparators import HostMemoryCost
from serving.simulator.device_spec import find_device
from serving.simulator.event_loop import Cluster, LoopConfig
from serving.simulator.memory import MemoryPlan
from serving.simulator.model_shape import ModelShape
from serving.simulator.requests import RequestTable
from serving.simulator.result import PolicyResult, collect
from serving.simulator.router import OneHost
from serving.simulator.settings import SimulationConfig
from serving.simulator.setups import REGROUP_S, make_setup
from serving.simulator.simulate import request_table, simulate
from serving.simulator.slo import Slo
from serving.simulator.step_cost import ModelStepCost, StepShape
from serving.simulator.transformation_cost import InPlaceCost
from sharding.page_table import MODELS, rows

PAGE_BYTES = 2 * 2**20
KV_PAGE_BYTES, STAGED_BYTES = 65_536, 70_000_000
"""Bytes of a KV page of a layer of Qwen2.5-32B, and AMOEBA's limit for temporaries (Figure 9b)."""
UNMAP_S = 25.6e-6
"""Seconds of `cuMemUnmap` for a page of 2 MiB on an A100: mean of 4,096 calls (bench_vmm of
github.com/magnate3/linux-riscv-dev)."""
KILO = 1000
RATES, OUTPUTS = (60, 240, 480), (64, 256, 1024)
"""Short requests per minute and output tokens of the sweeps."""


def shape(name: str, **sizes: Any) -> ModelShape:
    """Return a bf16 model with the sizes of its published `config.json`."""
    return ModelShape.from_hf(name, {"max_position_embeddings": 131072, **sizes})


QWEN = shape(
    "Qwen2.5-32B", hidden_size=5120, intermediate_size=27648, num_attention_heads=40, num_key_value_heads=8,
    num_hidden_layers=64, vocab_size=152064,
)  # fmt: skip
LLAMA_7B = shape(
    "Llama2-7B", hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_hidden_layers=32,
    vocab_size=32000,
)  # fmt: skip
QWEN_14B = shape(
    "Qwen2.5-14B", hidden_size=5120, intermediate_size=13824, num_attention_heads=40, num_key_value_heads=8,
    num_hidden_layers=48, vocab_size=152064,
)  # fmt: skip
LLAMA_8B = shape(
    "Llama3-8B", hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
    num_hidden_layers=32, vocab_size=128256,
)  # fmt: skip
LLAMA_70B = shape(
    "Llama-3-70B", hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
    num_hidden_layers=80, vocab_size=128256,
)  # fmt: skip
LLAMA_13B = shape(
    "Llama-2-13B", hidden_size=5120, intermediate_size=13824, num_attention_heads=40, num_hidden_layers=40,
    vocab_size=32000,
)  # fmt: skip
CONTEXTS = {1: 3.75, 2: 41.25, 4: 120.5}
THROUGHPUTS = {1: 448.0, 2: 670.0, 4: 767.0}


def fit_context(known: dict[int, float], degree: int) -> float:
    """Return the tokens that an instance holds at `degree`, computed from the tokens at two other degrees.

    An instance of degree p holds `a * p - b`. Here, `a` is the memory of a device minus its copy of the non-FFN
    weights. `b` is the memory of the FFN weights, which the instance stores once. `known`: tokens by degree.
    """
    (p, one), (q, two) = known.items()
    slope = (two - one) / (q - p)
    return one + slope * (degree - p)


def fit_throughput(known: dict[int, float], degree: int) -> float:
    """Return the tokens per second at `degree`, from a cost model that is fitted to two other degrees.

    The simulator's cost model gives the time of a decode step with contexts of 1K tokens. Two values are fitted: the
    batch size, and a factor for the latency of all-reduces. `known`: tokens per second by degree.
    """
    device = find_device("H20")
    ranks = dict.fromkeys((2, 4), 0.0)
    alone = ModelStepCost(QWEN, replace(device, all_reduce_latency_s=ranks))
    cost = ModelStepCost(QWEN, device)
    (p, one), (q, two) = sorted(known.items())

    def step_s(tp: int, batch: float, factor: float) -> float:
        shape = StepShape(max(round(batch), 1))
        base_s = alone.fixed_s(tp, shape)
        latencies_s = cost.fixed_s(tp, shape) - base_s
        return base_s + factor * latencies_s + cost.context_s(tp) * batch * KILO

    def factor(batch: float) -> float:
        """Return the factor for latencies with which the model gives the known tokens/s at the higher degree."""
        least_s = step_s(q, batch, 0.0)
        return (batch / two - least_s) / (step_s(q, batch, 1.0) - least_s)

    batches = np.linspace(2, 64, 6200)
    errors = [abs(batch / step_s(p, batch, factor(batch)) - one) for batch in batches]
    batch = float(batches[int(np.argmin(errors))])
    return batch / step_s(degree, batch, factor(batch))


def table_1() -> Iterable[Row]:
    """Return rows of AMOEBA Table 1 (Gyges Table 1).

    The table has TP1, TP2 and TP4. The row of each degree is predicted from the rows of the two other degrees.
    """
    for title, values, fit, fitted in (
        ("context (K tokens)", CONTEXTS, fit_context, "memory"),
        ("tokens/s", THROUGHPUTS, fit_throughput, "batch, all-reduce latency"),
    ):
        for degree, value in values.items():
            known = {tp: other for tp, other in values.items() if tp != degree}
            how = f"fitted to the two others: {fitted}"
            yield Row("AMOEBA Table 1", f"TP{degree} {title}, from the two others", value, fit(known, degree), how)
    plan = MemoryPlan(QWEN, find_device("H20"), 1.0, 14.3e9)
    for degree, value in CONTEXTS.items():
        tokens = plan.capacity_tokens(degree) / KILO
        yield Row("AMOEBA Table 1", f"TP{degree} pool of the sizes that 2.3 states", value, tokens, EXACT)


def tables_2_and_3() -> Iterable[Row]:
    """Return rows of AMOEBA Tables 2 and 3: pages of FFN tensors, and bytes of weights."""
    pages = {
        "GPT-OSS-120B": (1012.5, 253.125),
        "GPT-OSS-20B": (253.125, 63.281),
        "Llama-3.1-70B": (224, 56),
        "Qwen2.5-32B": (135, 33.75),
    }
    for model in MODELS:
        row = next(r for r in rows(model, PAGE_BYTES) if r.tensor == "down")
        # The two published figures of Llama fit a tensor of half the published size.
        for degree, paper, twin in ((1, pages[model.name][0], row.pages), (4, pages[model.name][1], row.shard_pages)):
            yield Row("AMOEBA Table 2", f"{model.name} pages of `down`, TP{degree}", paper, twin, EXACT)
    for model, gb in ((LLAMA_7B, 15.67), (LLAMA_8B, 16.66), (QWEN, 62.34)):
        yield Row("AMOEBA Table 3", f"{model.name} weights (GB)", gb, model.weight_bytes / 1e9, EXACT)


def figures_9_to_11() -> Iterable[Row]:
    """Return rows about a merge of Qwen2.5-32B from 4 x TP1 to TP4, with 90% of the KV cache in use."""
    device = find_device("H20")
    tokens = int(4 * 0.9 * MemoryPlan(QWEN, device, 1.0, 14.3e9).capacity_tokens(1))
    layers, change = QWEN.num_layers, InPlaceCost(QWEN, device).change(1, 4, tokens)
    wide = InPlaceCost(QWEN, device, phase_pages=STAGED_BYTES // 3 // KV_PAGE_BYTES).change(1, 4, tokens)
    what = "KV of a layer (ms), -i1 (61% below 4 ms)"
    yield Row("AMOEBA Figure 9a", what, 4 * 0.39, change.layer_s * 1e3, PREDICTED)
    yield Row("AMOEBA Figure 9a", f"{what}, phases of 70 MB", 4 * 0.39, wide.layer_s * 1e3, PREDICTED)
    yield Row("Gyges 3.4", "whole KV transformation (ms), 78 SMs", 522, change.seconds(layers) * 1e3, PREDICTED)
    unmapped = 0.75 * QWEN.ffn_bytes / PAGE_BYTES
    what = "weights (ms), -i1 (18.9% below 620): 64 layers unmapped, 'per layer' in the paper"
    yield Row(
        "AMOEBA Figure 10a", what, 620 * (1 - 0.189), unmapped * UNMAP_S * 1e3, "predicted; time of a page measured"
    )
    ratio = HostMemoryCost(QWEN, device).change(1, 4, tokens).seconds(layers) / change.seconds(layers)
    yield Row("AMOEBA 2.4", "Seesaw's time over in place", 41, ratio, PREDICTED)
    # A cost of 97.2% less. Shares saved hide the difference of ratios: 94% and 97%.
    what = "Seesaw's extra cost over in place, all layers in a step"
    yield Row("AMOEBA Figure 11", what, 1 / (1 - 0.972), ratio, PREDICTED)
    base = ModelStepCost(QWEN, device)
    step_s = base.fixed_s(4, StepShape(32)) + base.context_s(4) * tokens
    for count in (1, 4, 16, 64):
        what = f"step longer by the switch of {count} layers (%), at most 1, beside decodes"
        yield Row("AMOEBA Figure 11", what, 1.0, 100 * count * change.layer_s / step_s, PREDICTED)
    prompt_s = published_mechanisms.prompt_s(base, 4, 1, 50_000)
    what = "step longer by the switch of 64 layers (%), at most 1, beside a prompt of 50K"
    yield Row("AMOEBA Figure 11", what, 1.0, 100 * change.seconds(layers) / prompt_s, PREDICTED)


def flying() -> Iterable[Row]:
    """Return rows of Flying Serving that need no simulation of a load: Llama-3-70B on 8 H200."""
    device = flying_paper.device()
    budget = 264e3 * LLAMA_70B.kv_token_bytes() / 2 + LLAMA_70B.weight_bytes / 2
    for degree, value, how in ((2, 264, "calibrated on this row"), (4, 959, CALIBRATED), (8, 2300, CALIBRATED)):
        tokens = degree * (budget - LLAMA_70B.weight_bytes / degree) / LLAMA_70B.kv_token_bytes()
        yield Row("Flying Serving Table 2", f"static TP{degree} context (K tokens)", value, tokens / KILO, how)
    kept = 8 * (budget - LLAMA_70B.weight_bytes / 2) / LLAMA_70B.kv_token_bytes()
    yield Row("Flying Serving Table 2", "merged to 8, TP2's weights kept (K tokens)", 1900, kept / KILO, CALIBRATED)
    cost = ModelStepCost(LLAMA_70B, device)
    for name, degree, value in (("static TP", 8, 22.0), ("static DP", 2, 32.0)):
        step_s = cost.fixed_s(degree, StepShape(32)) + cost.context_s(degree) * 32 * KILO
        how = "predicted; host work fitted to static DP" if degree == 8 else "calibrated on this row"
        yield Row("Flying Serving Table 1", f"{name} mean TPOT (ms): 32 sequences of 1K", value, step_s * 1e3, how)


def flying_served(seeds: int) -> Iterable[Row]:
    """Return rows of the policies under the loads of Flying Serving.

    The lengths of requests are fitted to the paper's rows of static policies. The host time of a step is fitted to the
    TPOT of static data parallelism.
    """
    for where, what, paper, twin, fitted in flying_paper.figures(LLAMA_70B, seeds):
        how = "lengths calibrated on this row" if fitted else "predicted; lengths and host work fitted to static rows"
        yield Row(where, what, paper, twin, how)
    yield Row("Flying Serving Table 2", "live switch (ms)", 15.0, REGROUP_S * 1e3, "set: views of buffers change")


def quick_rows() -> Iterable[Row]:
    """Return the rows that take seconds to compute, without simulations of loads."""
    yield from table_1()
    yield from tables_2_and_3()
    yield from figures_9_to_11()
    yield from flying()


def cocoserve(seeds: int) -> Iterable[Row]:
    """Return rows of CoCoServe: Llama-2-13B on four A100-40. `cocoserve_paper` names the fitted values."""
    for name, paper, ideal, found in cocoserve_paper.figure_6(LLAMA_13B, seeds):
        if math.isnan(ideal):
            yield Row("CoCoServe Figure 6", name, paper, found, "calibrated on this row")
            continue
        yield Row("CoCoServe Figure 6", f"{name}, Equation 4", paper, ideal, EXACT)
        yield Row("CoCoServe Figure 6", f"{name}, simulated", paper, found, "predicted; baseline fitted")
    ratio = cocoserve_paper.memory_ratio(LLAMA_13B)
    yield Row("CoCoServe 6.3", "memory of 2 instances with replicas over 2 instances", 1.0889, ratio, EXACT)
    for load, more, found, less, saved in cocoserve_paper.figure_10(LLAMA_13B, seeds):
        how = "predicted; load fitted to 4 instances"
        yield Row("CoCoServe Figure 10", f"{load} load: throughput with replicas over without", more, found, how)
        yield Row("CoCoServe Figure 10", f"{load} load: latency with replicas over without", less, saved, how)
    for name, paper, found, is_fitted in cocoserve_paper.figure_11(LLAMA_13B):
        how = "calibrated on this row" if is_fitted else "predicted; load and deadline fitted"
        yield Row("CoCoServe Figure 11", name, paper, found, how)


def comparators() -> Iterable[Row]:
    """Return rows of other systems: Shift Parallelism, LoongServe and KunServe (`published_mechanisms`)."""
    yield from published_mechanisms.shift_parallelism(LLAMA_70B)
    yield from published_mechanisms.loongserve(LLAMA_7B)
    yield from published_mechanisms.kunserve(QWEN_14B)
    for name, lead in (("kunserve", "KunServe"), ("loongserve", "LoongServe")):
        lost = 100 * (1 - _capacity(name) / _capacity("amoeba"))
        yield Row(f"{lead}, in Gyges 3.3", "throughput below merged TP (%), 'extra 43.5%'", 43.5, lost, PREDICTED)


def _capacity(policy: str) -> float:
    """Return the tokens per second of a policy if many requests of AMOEBA's workload always wait."""
    load = WorkloadConfig(
        dataset_name="mix", num_prompts=600, short_per_minute=6000, long_per_minute=100, short_output_len=256,
        long_output_len=256,
    )  # fmt: skip
    config = SimulationConfig(QWEN, load, device="H20", memory_utilization=1.0, activation_gb=30.0)
    return simulate(config, policy).output_throughput


@dataclass(frozen=True)
class Point:
    """Results at one load, by policy. All values are averaged over seeds.

    Attributes:
        means: tokens per second.
        halves: half the width of the 95% interval of `means`.
        slo_shares: share of requests that meet the latency objectives.
        ttft_ms: mean TTFT of requests.
        tpot_ms: mean TPOT of requests.
        merges: number of merges.
        lows: 10th percentile of the tokens in a second, divided by their mean (Figure 13).
    """

    short_per_minute: float
    output_len: int
    means: dict[str, float]
    halves: dict[str, float]
    slo_shares: dict[str, float]
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    merges: dict[str, float]
    lows: dict[str, float]


ACTIVATION_GB = 14.3
"""Temporaries of each device, as AMOEBA 2.3 states them."""
TABLE_1 = {degree: int(KILO * tokens) // 16 * 16 for degree, tokens in CONTEXTS.items()}
"""Capacities in tokens by degree, if the contexts of Table 1 are capacities."""
FIXED = ("static-tp1", "static-tp2", "static-tp4", "static-mixed")


def sweep(
    policies: tuple[str, ...],
    rates: Iterable[float],
    outputs: Iterable[int],
    seeds: int,
    duration_s: float,
    capacities: dict[int, int] | None = None,
) -> list[Point]:
    """Simulate the workload of AMOEBA 4.2.4 on 8 H20, for each rate and each output length. Nothing is fitted.

    `rates`: short requests per minute. `outputs`: output tokens of a request. `capacities`: tokens that an instance
    holds, by degree. None: computed from the sizes that the paper states.
    """
    points = []
    for output in outputs:
        for rate in rates:
            found: dict[str, list[PolicyResult]] = {name: [] for name in policies}
            for seed in range(seeds):
                load = WorkloadConfig(
                    dataset_name="mix", duration_s=duration_s, short_per_minute=rate, short_output_len=output,
                    long_output_len=output, seed=seed,
                )  # fmt: skip
                config = SimulationConfig(
                    QWEN, load, device="H20", memory_utilization=1.0, activation_gb=ACTIVATION_GB, until_s=duration_s,
                    slo=Slo(10.0, 0.1), max_num_seqs=64,
                )  # fmt: skip
                requests = request_table(config)
                for name in policies:
                    found[name].append(serve(config, name, requests, capacities))
            points.append(_point(rate, output, found))
    return points


def serve(
    config: SimulationConfig, name: str, requests: RequestTable, capacities: dict[int, int] | None
) -> PolicyResult:
    """Simulate one policy. If `capacities` is given, only its degrees exist, and instances hold these numbers of
    tokens."""
    if capacities is None:
        return simulate(config, name, requests)
    setup = make_setup(config, name)
    limits = tuple(
        replace(limit, capacity_tokens=capacities[limit.degree])
        for limit in setup.host.limits
        if limit.degree in capacities
    )
    host = replace(setup.host, limits=limits)
    cluster = Cluster([(host, setup.make_policy)], requests, OneHost(), bin_s=1.0)
    cluster.run(LoopConfig(config.until_s))
    return collect(name, cluster, config.slo, config.num_devices)


def _point(rate: float, output: int, found: dict[str, list[PolicyResult]]) -> Point:
    def mean(of: Callable[[PolicyResult], float]) -> dict[str, float]:
        return {name: float(np.nanmean([of(result) for result in results])) for name, results in found.items()}

    def tokens(result: PolicyResult) -> float:
        return result.tally.generated_tokens / max(result.duration_s, 1.0)

    def low(result: PolicyResult) -> float:
        bins = np.array(result.tally.tokens_per_bin[:-1])
        return float(np.percentile(bins, 10) / max(bins.mean(), 1e-9))

    def worst(values: np.ndarray) -> float:
        return float(np.nanmean(values)) * 1e3 if (~np.isnan(values)).any() else math.nan

    return Point(
        rate,
        output,
        mean(tokens),
        {name: _half([tokens(result) for result in results]) for name, results in found.items()},
        mean(lambda result: result.kept_share),
        mean(lambda result: worst(result.ttft_s)),
        mean(lambda result: worst(result.tpot_s)),
        mean(lambda result: float(result.counters["scale_ups"])),
        mean(low),
    )


def rows_of_sweeps(stated: list[Point], tabled: list[Point], systems: list[Point]) -> Iterable[Row]:
    """Return rows of AMOEBA's Figures 12 to 14.

    Args:
        stated: points of Figures 12 and 13, with capacities from the sizes that the paper states.
        tabled: points of Figures 12 and 13, with the capacities of Table 1.
        systems: points of Figure 14.
    """
    others = "round_robin", "least_load_first"
    for sizes, points in ((f"{ACTIVATION_GB} GB", stated), ("Table 1", tabled)):
        for point in points:
            where = f"{sizes}, {point.short_per_minute:g} short/min, {point.output_len} out"
            gain = point.means["amoeba"] / max(point.means[name] for name in others)
            yield Row("AMOEBA Figure 12", f"{where}: tokens/s over RR and LLF; at least", 1.261, gain, PREDICTED)
            low = point.lows["amoeba"] / max(min(point.lows[name] for name in others), 1e-9)
            what = f"{where}: slowest tenth over mean, amoeba over RR and LLF; above 1"
            yield Row("AMOEBA Figure 13", what, None, low, PREDICTED)
            merges = max(point.merges[name] for name in others), point.merges["amoeba"]
            what = f"{where}: merges of RR or LLF less amoeba's; above 0"
            yield Row("AMOEBA Figure 13", what, None, merges[0] - merges[1], PREDICTED)
    gains = [point.means["amoeba"] / point.means[name] for point in systems for name in ("kunserve", "loongserve")]
    for what, paper, gain in (("least", 1.75, min(gains)), ("most", 6.57, max(gains))):
        yield Row("AMOEBA Figure 14", f"times the tokens of KunServe and LoongServe, {what}", paper, gain, PREDICTED)
    for name, saved in (("ttft_ms", 53.0), ("tpot_ms", 74.0)):
        best = max(
            100 * (1 - values["amoeba"] / max(values["kunserve"], values["loongserve"]))
            for values in (getattr(point, name) for point in systems)
        )
        yield Row("AMOEBA Figure 14", f"{name.split('_')[0].upper()} saved, at most (%)", saved, best, PREDICTED)


def _half(values: list[float]) -> float:
    """Return half the width of the 95% interval of the mean, by Student's t; NaN if there is only one value."""
    factors = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}
    if len(values) < 2:
        return math.nan
    return factors.get(len(values), 2.0) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def print_rows(found: list[Row], console: Console) -> None:
    """Print a table of all rows, and the causes of differences."""
    table = Table("where", "what", "paper", "twin", "ratio", "how", title="papers and twin")
    for row in found:
        cells = ["" if v is None else f"{v:.4g}" for v in (row.paper, row.twin, row.ratio)]
        table.add_row(row.where, row.what, *cells, row.how)
    console.print(table)
    console.print("Differences over 15%:")
    for row in filter(lambda row: row.differs, found):
        console.print(f"- {row.where}, {row.what} ({row.ratio:.2g}): {cause(row) or 'unexplained'}", soft_wrap=True)


def _plain(found: list[Row]) -> list[dict[str, Any]]:
    return [asdict(row) | {"ratio": row.ratio, "cause": cause(row) if row.differs else None} for row in found]


def print_points(points: list[Point], title: str, console: Console) -> None:
    """Print a row for each load: results of each policy, and gain of the first policy over the best other policy."""
    names = list(points[0].means)
    table = Table("output", "short/min", *names, f"{names[0]} over the best other", title=title)
    for point in points:
        cells = [f"{point.means[n]:.0f} ± {point.halves[n]:.0f} ({point.slo_shares[n]:.0%})" for n in names]
        best = max(point.means[n] for n in names[1:])
        table.add_row(
            str(point.output_len), f"{point.short_per_minute:g}", *cells, f"{point.means[names[0]] / best:.2f}"
        )
    console.print(table)


def save_region(points: list[Point], path: Path) -> None:
    """Plot the gain of the first policy over the best other policy, by load and output length."""
    from matplotlib.figure import Figure

    names = list(points[0].means)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for output in sorted({point.output_len for point in points}):
        own = [point for point in points if point.output_len == output]
        gains = [p.means[names[0]] / max(p.means[n] for n in names[1:]) for p in own]
        axes.plot([p.short_per_minute for p in own], gains, marker="o", label=f"{output} tokens out")
    axes.axhspan(1.261, 1.392, color="#2f9e6e", alpha=0.2, label="AMOEBA Figure 12")
    axes.set(xscale="log", xlabel="short requests a minute", ylabel=f"{names[0]} over the best other")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="short requests per minute")
    parser.add_argument("--outputs", type=int, nargs="+", default=OUTPUTS, help="output tokens")
    parser.add_argument("--duration", type=float, default=300.0, help="seconds of arrivals in the sweeps")
    parser.add_argument("--quick", action="store_true", help="no sweeps of Figures 12 to 14")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    console = Console(width=150)
    found = [*quick_rows(), *comparators()]
    print_rows(found, console)
    content: dict[str, Any] = {"rows": _plain(found)}
    if not options.quick:
        served = [*flying_served(options.seeds), *cocoserve(options.seeds)]
        baselines = ("amoeba", "round_robin", "least_load_first", *FIXED)
        runs = (options.rates, options.outputs, options.seeds, options.duration)
        stated = sweep(baselines, *runs)
        tabled = sweep(baselines, *runs, TABLE_1)
        systems = sweep(("amoeba", "kunserve", "loongserve"), *runs, TABLE_1)
        served += rows_of_sweeps(stated, tabled, systems)
        print_rows(served, console)
        content["rows"] += _plain(served)
        for title, points in (
            (f"AMOEBA Figures 12, 13, {ACTIVATION_GB} GB of activations", stated),
            ("AMOEBA Figures 12, 13, capacities of Table 1", tabled),
            ("AMOEBA Figure 14, capacities of Table 1", systems),
        ):
            print_points(points, f"{title}: tokens/s, 95% interval, share within TTFT 10 s and TPOT 0.1 s", console)
            content[title] = [asdict(point) for point in points]
        if options.plot:
            for number, points in ((12, stated), (14, systems)):
                save_region(points, options.plot.with_stem(f"{options.plot.stem}-{number}"))
    console.print("Not reproduced:")
    for line in NOT_REPRODUCED:
        console.print(f"- {line}", soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
