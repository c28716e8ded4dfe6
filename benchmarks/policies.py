"""Comparison of scheduling policies and fixed degrees. All serve the same requests on one server.

    python benchmarks/policies.py [--dataset mix|burst] [--duration 40] [--seeds 1 2 3] [--json FILE]

There are two workloads:

- `mix` is AMOEBA's workload, scaled to the machine. For every 20 short prompts, it has one long prompt that one device
  cannot hold.
- `burst` is Flying Serving's workload. Phases with a low rate and with a high rate alternate, and a share of the
  requests is urgent.

The fixed degrees are `static-tp1`, `static-tp2`, `static-tp4` and `static-mixed` (half of the devices form one
instance, the others are TP1). Requests arrive faster than they are served. `--max-concurrency` limits the requests in
flight. A first round compiles programs and is not counted.

The first table has means over the seeds with 95% intervals (Student's t). If no instance of a fixed degree can hold a
request, the request is refused. Refused requests count as failed, and do not count in the goodput. For `burst`, a
second table has the 90th percentiles of TTFT and queue time in each phase, over the requests of all seeds
(`pooled.py`). Its last column is the ratio of a policy's percentile to the lowest percentile of a fixed degree.
`--from-json` prints both tables from files that `--json` wrote.
"""

import argparse
import json
import time
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pooled import Pool
from rich.console import Console
from rich.table import Table
from server_process import bench, server

from amoeba_jax.client import Client

FIELDS = {
    "completed": "done",
    "failed": "failed",
    "request_goodput": "good/s",
    "output_throughput": "tokens/s",
    "peak_output_throughput": "peak tokens/s",
    "p50_ttft_ms": "TTFT p50",
    "p90_ttft_ms": "TTFT p90",
    "p99_ttft_ms": "TTFT p99",
    "p90_server_queue_time_ms": "queue p90",
    "merges": "merges",
    "splits": "splits",
}
STATIC = {"static-tp1": 1, "static-tp2": 2, "static-tp4": 4, "static-mixed": 0}
POLICIES = ("amoeba", "amoeba_paper", "flying", "cocoserve", "round_robin", "least_load_first", *STATIC)
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Two-sided 95% quantiles of Student's t by degrees of freedom."""


def interval(values: list[float]) -> float:
    """Return half the width of the 95% interval of the mean; infinity if there is only one value."""
    if len(values) < 2:
        return float("inf")
    return _T95.get(len(values) - 1, 1.96) * stdev(values) / sqrt(len(values))


def run(target: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run `amoeba bench` once and return its JSON report."""
    flags = {
        "dataset-name": options.dataset,
        "duration": options.duration,
        "seed": seed,
        "priority-share": options.priority_share,
        "max-concurrency": options.max_concurrency,
        "metric-percentiles": "50,90,99",
        "percentile-metrics": "ttft,tpot,itl,server_queue_time",
    }
    if options.dataset == "mix":
        names = [f"{kind}_{what}" for kind in ("short", "long") for what in ("input_len", "output_len", "per_minute")]
        flags |= {name.replace("_", "-"): getattr(options, name) for name in names}
    else:
        flags |= {"random-input-len": options.short_input_len, "random-output-len": options.short_output_len}
        flags |= {"low-rate": options.low_rate, "high-rate": options.high_rate, "phase-s": options.phase_s}
    found = bench(target, flags, "--save-detailed", "--goodput", *options.goodput)
    return found | found["instances"]


def begin(client: Client, name: str, num_devices: int, settle_s: float) -> None:
    """Set the first layout of a policy, start the policy, and wait `settle_s` seconds."""
    client.set_policy("static")
    while any(i.tensor_parallel_size > 1 for i in client.cluster().instances):
        client.transform(1)
    if name in STATIC:
        if STATIC[name] > 1:
            client.transform(STATIC[name], wait_for_programs=True)
        elif STATIC[name] == 0:
            client.transform(num_devices // 2, devices=list(range(num_devices // 2)), wait_for_programs=True)
    else:
        client.set_policy(name)
    time.sleep(settle_s)


def show(title: str, results: dict[str, list[dict[str, Any]]]) -> None:
    table = Table("policy", *FIELDS.values(), title=title)
    for name, reports in results.items():
        cells = []
        for field in FIELDS:
            values = [float(value) for report in reports if (value := report.get(field)) is not None]
            cells.append(f"{mean(values):.1f}\n±{interval(values):.1f}" if values else "-")
        table.add_row(name, *cells)
    Console(width=150).print(table)


def show_phases(results: dict[str, list[dict[str, Any]]]) -> None:
    """Print the 90th percentiles of TTFT and queue time in each phase, over the requests of all seeds.

    The last column is the ratio of a policy's percentile to the lowest percentile of a fixed degree.
    """
    table = Table("phase", "P90 of", "policy", "requests", "ms", "ratio to the better fixed degree")
    for phase in ("low", "high"):
        for field, what in (("ttfts", "TTFT"), ("server_queue_times", "queue time")):
            pools = {name: Pool(reports, field, phase) for name, reports in results.items()}
            pools = {name: pool for name, pool in pools.items() if pool.size}
            found = {name: pool.percentile(90) for name, pool in pools.items()}
            best = min((name for name in pools if name in STATIC), key=lambda name: found[name].value, default=None)
            for name, pool in pools.items():
                ratio = "-"
                if best is not None and name not in STATIC:
                    ratio = f"{pool.ratio(pools[best], 90).text()} {best}"
                table.add_row(phase, what, name, str(pool.size), found[name].text(1e3, 1), ratio)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-devices", type=int, default=4)
    parser.add_argument("--kv-cache-tokens", type=int, default=768, help="tokens of the KV cache of each device")
    parser.add_argument("--device-memory", default="1GiB")
    parser.add_argument("--linger-s", type=float, default=60.0)
    parser.add_argument("--merge-to", type=int, default=1, help="minimum degree of merges of `amoeba`")
    parser.add_argument("--layers-per-step", type=int, default=4)
    parser.add_argument("--dataset", choices=("mix", "burst"), default="mix")
    parser.add_argument("--duration", type=float, default=40.0, help="seconds of arrivals")
    parser.add_argument("--short-input-len", type=int, default=32, help="prompt tokens, also for burst")
    parser.add_argument("--short-output-len", type=int, default=32, help="output tokens, also for burst")
    parser.add_argument("--short-per-minute", type=float, default=240)
    parser.add_argument("--long-input-len", type=int, default=1024)
    parser.add_argument("--long-output-len", type=int, default=32)
    parser.add_argument("--long-per-minute", type=float, default=12)
    parser.add_argument("--low-rate", default="1:2")
    parser.add_argument("--high-rate", default="4:8")
    parser.add_argument("--phase-s", type=float, default=10.0)
    parser.add_argument("--settle-s", type=float, default=0.0, help="seconds without requests before each run")
    parser.add_argument("--priority-share", type=float, default=0.0)
    parser.add_argument("--goodput", nargs="+", default=["ttft:10000", "tpot:1000"])
    parser.add_argument("--max-concurrency", type=int, default=16)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path, help="file for the reports")
    parser.add_argument(
        "--from-json", type=Path, nargs="+", default=[], help="files with reports to print, in place of new runs"
    )
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.policies}
    if options.from_json:
        for path in options.from_json:
            for name, reports in json.loads(path.read_text()).items():
                results.get(name, []).extend(reports)
    else:
        measure(options, results)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    results = {name: reports for name, reports in results.items() if reports}
    if not results:
        parser.error(f"no reports of {', '.join(options.policies)}")
    (first, *_), *_ = results.values()
    load = first["workload"]
    title = f"{first['model_id']}, {load['dataset_name']} for {load['duration_s']:g} s"
    show(f"{title}; means over {max(map(len, results.values()))} seeds, ms", results)
    if all(report["phases"] and "ttfts" in report for reports in results.values() for report in reports):
        show_phases(results)


def measure(options: argparse.Namespace, results: dict[str, list[dict[str, Any]]]) -> None:
    """Run all policies with all seeds, and add the reports to `results`."""
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
    with server(settings) as target, Client(target) as client:
        for place, seed in enumerate([options.seeds[0], *options.seeds]):
            for name in options.policies:
                begin(client, name, options.num_devices, options.settle_s)
                report = run(target, options, seed)
                print(f"{name}, seed {seed}: " + ", ".join(f"{f} {report[f]}" for f in FIELDS), flush=True)
                if place:
                    results[name].append(report)


if __name__ == "__main__":
    main()
