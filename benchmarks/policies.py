"""The scheduler's policies side by side: a mix of short requests and a few long ones, on one server.

    python benchmarks/policies.py [--model smollm2-135m] [--duration 40] [--repeats 1] [--json FILE]

AMOEBA's mix scaled to the machine: short prompts, and for every 20 of them a long one that one device cannot hold. They
come faster than they are served, and `--max-concurrency` are with the server at a time, so that throughput is what it
can do. All policies get the same requests in the same order, from `amoeba bench`; the first round compiles what they
need and is not counted.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from server_process import server

from amoeba_jax.client import Client

FIELDS = ("completed", "failed", "output_throughput", "p50_ttft_ms", "p99_ttft_ms", "merges", "splits")


def run(target: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run of `amoeba bench`, by its JSON report."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        flags = {
            "target": target,
            "dataset-name": "mix",
            "duration": options.duration,
            "seed": seed,
            "short-input-len": options.short_input_len,
            "short-output-len": options.short_output_len,
            "short-per-minute": options.short_per_minute,
            "long-input-len": options.long_input_len,
            "long-output-len": options.long_output_len,
            "long-per-minute": options.long_per_minute,
            "max-concurrency": options.max_concurrency,
            "metric-percentiles": "50,99",
            "result-filename": report,
        }
        command = [
            sys.executable,
            "-m",
            "serving.cli",
            "bench",
            *(f"--{name}={value}" for name, value in flags.items()),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(report.read_text())
        return found | found["instances"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-devices", type=int, default=4)
    parser.add_argument("--kv-cache-tokens", type=int, default=768, help="of each device")
    parser.add_argument("--device-memory", default="1GiB")
    parser.add_argument("--linger-s", type=float, default=60.0)
    parser.add_argument("--merge-to", type=int, default=1, help="of `amoeba`: the degree that merges go to at least")
    parser.add_argument("--layers-per-step", type=int, default=4)
    parser.add_argument("--duration", type=float, default=40.0, help="seconds of arrivals")
    parser.add_argument("--short-input-len", type=int, default=32)
    parser.add_argument("--short-output-len", type=int, default=32)
    parser.add_argument("--short-per-minute", type=float, default=240)
    parser.add_argument("--long-input-len", type=int, default=1024)
    parser.add_argument("--long-output-len", type=int, default=32)
    parser.add_argument("--long-per-minute", type=float, default=12)
    parser.add_argument("--max-concurrency", type=int, default=16)
    parser.add_argument("--policies", nargs="+", default=["round_robin", "least_load_first", "amoeba"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = {
        "model": options.model,
        "num_devices": options.num_devices,
        "device_memory": options.device_memory,
        "kv_cache_tokens": options.kv_cache_tokens,
        "max_num_seqs": 8,
        "max_model_len": 2048,
        "linger_s": options.linger_s,
        "merge_to": options.merge_to,
        "layers_per_step": options.layers_per_step,
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.policies}
    with server(settings) as target, Client(target) as client:
        for repeat in range(options.repeats + 1):
            for name in options.policies:
                client.set_policy(name)
                report = run(target, options, seed=max(repeat, 1))
                print(f"{name}, round {repeat}: " + ", ".join(f"{f} {report[f]}" for f in FIELDS), flush=True)
                if repeat:
                    results[name].append(report)
                # What this policy has merged is split again before the next has its turn.
                client.set_policy("round_robin")
                while any(i.tensor_parallel_size > 1 for i in client.cluster().instances):
                    client.transform(1)
    table = Table(title=f"{options.model}, {options.num_devices} devices, {options.duration:g} s; medians")
    for column in ("policy", *FIELDS):
        table.add_column(column, justify="right" if column != "policy" else "left")
    for name, reports in results.items():
        table.add_row(name, *(f"{median(report[field] for report in reports):.1f}" for field in FIELDS))
    Console(width=130).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
