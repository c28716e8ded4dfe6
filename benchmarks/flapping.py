"""Tokens per second of a policy that changes degrees, compared with fixed degrees, by simulation.

    python benchmarks/flapping.py [--policy amoeba] [--seeds 2] [--duration 900] [--settle-s 120] [--json flapping.json]

The model is Qwen2.5-32B on 8 H20. Short requests arrive faster than the devices can serve them, so that time lost by
changes lowers the tokens per second. The cases differ in the gap between two long requests, in the output length of
long requests, and in the duration of a change of degree. Only fixed degrees that can hold the long requests are
compared.

The table has these columns for each case:

- the tokens per second of the policy and of each fixed degree, after the first `--settle-s` seconds.
- "over the best": the ratio of the policy to the best fixed degree, with the 95% interval over seeds.
- "from the start": the same ratio, but over the whole run.
- "changes": the number of changes in the whole run, and the number of changes after `--settle-s`.

For each gap and output length, a line names the shortest duration of a change at which the policy is worse than the
best fixed degree. The exit code is 1 if the policy is more than 2% worse in any case. Load varies in waves of a minute,
so a run should simulate at least ten minutes. With the default options, the benchmark takes half an hour.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from papers import QWEN
from policies import interval
from rich.console import Console
from rich.table import Table

from serving.bench.workload import WorkloadConfig
from serving.simulator import simulate as simulation
from serving.simulator.settings import SimulationConfig
from serving.simulator.setups import Setup, make_setup
from serving.simulator.simulate import request_table, simulate
from serving.simulator.slo import Slo
from serving.simulator.transformation_cost import FixedTransformation

STATIC = ("static-tp2", "static-tp4", "static-mixed")
MAX_LOSS = 0.02


def config_of(options: argparse.Namespace, gap_s: float, tokens: int, seed: int) -> SimulationConfig:
    """Return the workload: too many short requests, and every `gap_s` seconds a long request with `tokens` output
    tokens."""
    load = WorkloadConfig(
        dataset_name="mix",
        duration_s=options.duration,
        short_per_minute=options.short_per_minute,
        short_output_len=256,
        long_input_len=options.long_input_len,
        long_output_len=tokens,
        long_per_minute=60 / gap_s,
        seed=seed,
    )
    return SimulationConfig(
        QWEN, load, device="H20", memory_utilization=1.0, activation_gb=26.0, until_s=options.duration,
        slo=Slo(10.0, 0.1),
    )  # fmt: skip


class Found(NamedTuple):
    """Tokens per second and number of changes of degree.

    Fields with `all_` count the whole run. The other fields count only the time after `settle_s`.
    """

    all_tokens: float
    tokens: float
    all_changes: int
    changes: int


def run(config: SimulationConfig, name: str, change_s: float, settle_s: float) -> Found:
    """Simulate the policy `name`, with changes of degree that take `change_s` seconds."""

    def setup(config: SimulationConfig, name: str) -> Setup:
        made = make_setup(config, name)
        fixed = FixedTransformation(change_s, made.host.transformation.layers)
        return replace(made, host=replace(made.host, transformation=fixed))

    with mock.patch.object(simulation, "make_setup", setup):
        result = simulate(config, name, request_table(config))
    report, tally, duration_s = result.report(), result.tally, config.workload.duration_s
    assert duration_s is not None
    assert not report["failed"], report
    first = math.ceil(settle_s / tally.bin_s)
    seconds = duration_s - first * tally.bin_s
    ended_s = [ended_s for ended_s, *_ in tally.changes]
    return Found(
        tally.generated_tokens / duration_s,
        float(np.sum(tally.tokens_per_bin[first : round(duration_s / tally.bin_s)])) / seconds,
        len(ended_s),
        sum(at_s >= first * tally.bin_s for at_s in ended_s),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="amoeba")
    parser.add_argument("--gaps-s", type=float, nargs="+", default=[10.0, 30.0, 90.0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--changes-s", type=float, nargs="+", default=[0.1, 1.0, 10.0])
    parser.add_argument("--settle-s", type=float, default=120.0, help="seconds at the start that do not count")
    parser.add_argument("--short-per-minute", type=float, default=900.0)
    parser.add_argument("--long-input-len", type=int, default=50_000)
    parser.add_argument("--duration", type=float, default=900.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not 0 <= options.settle_s < options.duration:
        parser.error(f"--settle-s {options.settle_s:g} must be less than --duration {options.duration:g}")
    table = Table("gap s", "tokens", "change s", options.policy, *STATIC, "over the best", "from the start", "changes")
    rows: list[dict[str, Any]] = []
    breaks: dict[tuple[float, int], float | None] = {}
    for gap in options.gaps_s:
        for tokens in options.tokens:
            configs = [config_of(options, gap, tokens, seed) for seed in range(options.seeds)]
            each = {name: [run(config, name, 1.0, options.settle_s) for config in configs] for name in STATIC}
            fixed = {name: mean(found.tokens for found in values) for name, values in each.items()}
            best = each[max(fixed, key=fixed.__getitem__)]
            breaks[gap, tokens] = None
            for change in options.changes_s:
                found = [run(config, options.policy, change, options.settle_s) for config in configs]
                own = mean(it.tokens for it in found)
                ratio = own / mean(it.tokens for it in best)
                ratios = [it.tokens / other.tokens for it, other in zip(found, best, strict=True)]
                from_start = mean(it.all_tokens for it in found) / mean(it.all_tokens for it in best)
                changes = mean(it.all_changes for it in found), mean(it.changes for it in found)
                if ratio < 1 and breaks[gap, tokens] is None:
                    breaks[gap, tokens] = change
                cells = (
                    f"{own:.0f}",
                    *(f"{fixed[name]:.0f}" for name in STATIC),
                    f"{ratio:.3f} ±{interval(ratios):.3f}",
                    f"{from_start:.3f}",
                    "{:.3g}, {:.3g}".format(*changes),
                )
                table.add_row(f"{gap:g}", str(tokens), f"{change:g}", *cells)
                rows.append({"gap_s": gap, "tokens": tokens, "change_s": change, options.policy: own, **fixed,
                             "ratio": ratio, "ratios": ratios, "from_start": from_start,
                             "changes": changes})  # fmt: skip
    console = Console(width=140)
    console.print(table)
    for (gap, tokens), change in breaks.items():
        said = "at none of these" if change is None else f"from {change:g} s a change on"
        console.print(f"every {gap:g} s, {tokens} tokens: below the best fixed degree {said}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if any(row["ratio"] < 1 - MAX_LOSS for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
