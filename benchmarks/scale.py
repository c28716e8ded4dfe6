"""Run time and memory of `amoeba simulate` for a large cluster and a day of a trace.

    python benchmarks/scale.py --model CONFIG --trace servegen_deepseek-r1.npz [--num-devices 10000] [--hours 24]

Each row simulates the first hours of the trace in its own process, so that memory is measured for each row. The last
column is the CPU time for each event in microseconds. If it is the same in all rows, the run time is linear in the
number of events.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from serving.bench.workload import WorkloadConfig
from serving.simulator.settings import SimulationConfig
from serving.simulator.simulate import request_table, simulate


def run(options: argparse.Namespace, hours: float) -> dict[str, float]:
    """Simulate the first hours of the trace in this process."""
    start = time.perf_counter()
    workload = WorkloadConfig(
        dataset_name="trace", trace=options.trace, duration_s=hours * 3600, trace_rate_scale=options.rate_scale
    )
    config = SimulationConfig(options.model, workload, device=options.device, num_devices=options.num_devices)
    requests = request_table(config)
    result = simulate(config, options.policy, requests)
    seconds = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_SELF)
    report = result.report()
    return {
        "hours": hours,
        "requests": len(requests),
        "completed": report["completed"],
        "events": result.tally.events,
        "steps": result.tally.steps,
        "tokens": result.tally.generated_tokens,
        "merges": report["merges"],
        "seconds": seconds,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "gib": usage.ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--num-devices", type=int, default=10_000)
    parser.add_argument("--rate-scale", type=float, default=1.0)
    parser.add_argument("--policy", default="amoeba")
    parser.add_argument("--hours", type=float, nargs="+", default=[3.0, 6.0, 12.0, 24.0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", action="store_true", help="one row in this process, printed as JSON")
    options = parser.parse_args()
    if options.row:
        print(json.dumps(run(options, options.hours[0])))
        return
    rows = []
    table = Table("hours", "requests", "events", "steps", "merges", "seconds", "CPU s", "GiB", "us/event")
    for hours in options.hours:
        own = [argument for argument in sys.argv[1:] if argument != "--row"]
        command = [sys.executable, __file__, *own, "--row", "--hours", str(hours)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append(row)
        table.add_row(
            f"{hours:g}", f"{row['requests']:,}", f"{row['events']:,}", f"{row['steps']:,}", f"{row['merges']:,}",
            f"{row['seconds']:.1f}", f"{row['cpu_s']:.1f}", f"{row['gib']:.2f}",
            f"{row['cpu_s'] / row['events'] * 1e6:.1f}",
        )  # fmt: skip
        print(f"{hours:g} hours: {row['seconds']:.1f} s", file=sys.stderr, flush=True)
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
