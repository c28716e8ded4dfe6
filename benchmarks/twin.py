"""Simulation compared with the real engine, for the same requests, policy and settings, at three loads.

    python benchmarks/twin.py [--model DIRECTORY] [--duration 30] [--rates 4 8 12] [--rounds 3] [--json twin.json]

The load has short requests, and a few long requests that only merged instances hold. The speed of virtual devices
varies, because they share the cores with other work. So each round runs all loads, and the engine is calibrated before
and after each round (`amoeba simulate --calibrate`). The simulation uses the mean of the two calibrations and the same
requests. The table has medians over the rounds. A ratio is the simulation's figure divided by the engine's figure in
the same round.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, SamplingParams
from serving.bench.workload import PlannedRequest, WorkloadConfig, plan_requests
from serving.commands.calibrate import calibrate
from serving.runtime.jax_executor import EngineScheduler
from serving.scheduler import AmoebaConfig, make_policy
from serving.simulator.calibration import Calibration
from serving.simulator.settings import SimulationConfig
from serving.simulator.simulate import simulate


@dataclass(frozen=True)
class Row:
    """Results of one run."""

    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    merges: int
    splits: int


_START_S = time.perf_counter()
FIGURES, CHANGES = ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s"), ("merges", "splits")


async def serve(llm: LLM, requests: list[PlannedRequest]) -> tuple[list[float], list[float], float]:
    """Send each request at its arrival time.

    Return the TTFTs and TPOTs that the engine measured, and the seconds of the run.
    """
    start = time.perf_counter()
    ttft, tpot = [], []

    async def one(request: PlannedRequest) -> None:
        await asyncio.sleep(max(start + request.arrival_s - time.perf_counter(), 0.0))
        params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
        prompt = request.prompt(0, llm._engine.dims.config.vocab_size)
        metrics = [output.metrics async for output in llm.astream(prompt, params)][-1]
        ttft.append(metrics.ttft_s)
        if request.output_len > 1:
            tpot.append(metrics.tpot_s)

    await asyncio.gather(*(one(request) for request in requests))
    return ttft, tpot, time.perf_counter() - start


def run_engine(llm: LLM, workload: WorkloadConfig, policy: str, config: AmoebaConfig, layers_per_step: int) -> Row:
    """Run the engine with a policy, and return its figures."""
    requests = plan_requests(workload, llm.max_model_len)
    hook = llm.use_scheduler_hook(
        lambda engine: EngineScheduler(engine, make_policy(policy, config=config), layers_per_step)
    )
    try:
        ttft, tpot, seconds = asyncio.run(serve(llm, requests))
    finally:
        counters = hook.scheduler.counters
        llm.remove_scheduler_hook()
        while llm._engine.changes.busy:
            time.sleep(0.05)
    if any(view.tensor_parallel_size > 1 for view in llm.instances):
        llm.transform(1)
    tokens = sum(request.output_len for request in requests)
    return Row(
        tokens / seconds, median(ttft), float(np.percentile(ttft, 99)), median(tpot), counters.scale_ups,
        counters.scale_downs,
    )  # fmt: skip


def run_twin(config: SimulationConfig, policy: str) -> Row:
    """Run the simulation, and return its figures."""
    report = simulate(config, policy).report()
    return Row(
        report["output_throughput"],
        report["p50_ttft_ms"] / 1e3,
        report["p99_ttft_ms"] / 1e3,
        report["p50_tpot_ms"] / 1e3,
        report["merges"],
        report["splits"],
    )


FIXED = (
    "model", "num_devices", "max_num_seqs", "max_num_batched_tokens", "page_size", "max_model_len", "num_layers",
    "layers_per_step", "capacity_tokens", "max_requests", "few_rows", "version",
)  # fmt: skip
"""Fields of a calibration that describe the engine. All other fields but `machine` are measured."""


def mean(one: Calibration, two: Calibration) -> Calibration:
    """Return the mean of two calibrations of one engine."""

    def between(a: Any, b: Any) -> Any:
        if isinstance(a, dict):
            return {key: between(value, b[key]) for key, value in a.items() if key in b}
        return (a + b) / 2

    same = {name for name in FIXED if getattr(one, name) != getattr(two, name)}
    if same:
        raise ValueError(f"the calibrations are of different engines: {', '.join(sorted(same))}")
    measured = [item.name for item in fields(Calibration) if item.name not in (*FIXED, "machine")]
    return replace(one, **{name: between(getattr(one, name), getattr(two, name)) for name in measured})


def workload(options: argparse.Namespace, rate: float) -> WorkloadConfig:
    """Return the workload: short requests, and a few long requests that fit only on merged instances."""
    return WorkloadConfig(
        dataset_name="mix",
        duration_s=options.duration,
        short_input_len=48,
        short_output_len=32,
        short_per_minute=60 * rate,
        long_input_len=options.long_input_len,
        long_output_len=32,
        long_per_minute=options.long_per_minute,
        seed=options.seed,
    )


def _log(text: str) -> None:
    print(f"{time.perf_counter() - _START_S:.0f} s: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-devices", type=int, default=4)
    parser.add_argument("--kv-cache-tokens", type=int, default=512, help="tokens of the KV cache of each device")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-num-batched-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--layers-per-step", type=int, default=2)
    parser.add_argument("--duration", type=float, default=30.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 8.0, 12.0], help="short requests per second")
    parser.add_argument("--long-per-minute", type=float, default=6.0)
    parser.add_argument("--long-input-len", type=int, default=700)
    parser.add_argument("--linger-s", type=float, default=2.0)
    parser.add_argument("--policy", default="amoeba")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    policy_config = AmoebaConfig(linger_s=options.linger_s)
    table = Table("short/s", "", "tokens/s", "TTFT p50 (s)", "p99 (s)", "TPOT p50 (s)", "merges", "splits")
    found: dict[float, list[dict[str, Any]]] = {rate: [] for rate in options.rates}
    with LLM(
        options.model,
        num_devices=options.num_devices,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_cache_tokens=options.kv_cache_tokens,
        max_model_len=options.max_model_len,
        prefix_caching=False,
        compile_beside=False,
        progress=False,
    ) as llm:
        llm.warmup()
        _log("programs are loaded")
        loads = {rate: workload(options, rate) for rate in options.rates}
        # This run compiles and is not counted.
        run_engine(llm, loads[options.rates[-1]], options.policy, policy_config, options.layers_per_step)
        _log("load served once, not counted")
        after = calibrate(llm, options.layers_per_step)
        for turn in range(options.rounds):
            before = after
            served = {
                rate: run_engine(llm, load, options.policy, policy_config, options.layers_per_step)
                for rate, load in loads.items()
            }
            _log(f"round {turn}: served")
            after = calibrate(llm, options.layers_per_step)
            calibration = mean(before, after)
            for rate, load in loads.items():
                engine = served[rate]
                config = SimulationConfig(
                    options.model,
                    load,
                    num_devices=options.num_devices,
                    calibration=calibration,
                    policy_config=policy_config,
                )
                twin = run_twin(config, options.policy)
                found[rate].append({"engine": vars(engine), "twin": vars(twin), "calibration": asdict(calibration)})
                _log(f"round {turn}, {rate:g}/s: {engine} {twin}")
    for rate, rounds in found.items():
        for name in ("engine", "twin"):
            cells = [f"{median(turn[name][figure] for turn in rounds):.4g}" for figure in (*FIGURES, *CHANGES)]
            table.add_row(f"{rate:g}", name, *cells)
        ratios = [median(turn["twin"][figure] / turn["engine"][figure] for turn in rounds) for figure in FIGURES]
        apart = [max(abs(turn["twin"][count] - turn["engine"][count]) for turn in rounds) for count in CHANGES]
        table.add_row("", "ratio; most apart", *(f"{ratio:.2f}" for ratio in ratios), *(str(n) for n in apart))
    Console(width=110).print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
