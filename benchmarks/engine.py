"""Speed of decode and prefill of amoeba-jax, transformers and other engines, which run one after the other.

    python benchmarks/engine.py [--engines amoeba transformers vllm llama.cpp openvino] [--json engine.json]

All engines compute in f32, greedily and on all cores. Each engine runs in its own process and loads the same
checkpoint. `peers/timing.py` defines the measurements. On first use, engines other than amoeba and transformers are
installed into virtual environments in the cache directory. If an engine cannot be installed, it is left out.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from decode import MODELS as RANDOM_MODELS
from peers.checkpoints import write_gguf, write_random_llama
from peers.environments import PEERS, PeerError, environment, last_words, python_of, runner_of
from rich.console import Console
from rich.table import Table

from amoeba_jax.checkpoint import ensure_default_model
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import num_parameters
from amoeba_jax.models.dims import ModelDims

SEED = 0
ITEM = 4
"""Bytes of an f32 element."""
BASELINE = "transformers"
CHECKED = 8
"""Number of first tokens on which all engines should agree: two equally likely tokens are rare this early."""
MODELS: dict[str, dict[str, Any] | None] = {"Llama-125M": RANDOM_MODELS["Llama-125M"], "SmolLM2-135M": None}
"""Config of a model with random weights; None for the default model."""
QUIET = 0.2
"""Cores that other processes may use before a run counts as disturbed."""
BANDWIDTH = "from machine import read_bandwidth; print(read_bandwidth())"

Say = Callable[[str], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="+", choices=PEERS, default=["amoeba", BASELINE])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens generated for each request")
    parser.add_argument(
        "--long-prompt", type=int, default=1024, help="tokens of the prompt for the prefill measurement"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.new_tokens < 2 or min([*options.batch, options.prompt, options.long_prompt, options.repeats]) < 1:
        parser.error("at least one request, prompt token and repeat, and two new tokens, are needed")
    progress, console = Console(stderr=True), Console(width=None if sys.stdout.isatty() else 150)

    def say(text: str) -> None:
        progress.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}", highlight=False, soft_wrap=True)

    report = benchmark(options, say)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report, console)


def benchmark(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Run every engine on every model, and return the measurements for the JSON file."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    report: dict[str, Any] = {
        "machine": {"cpu": cpu_name(), "threads": cores, "memory_bytes": memory_bytes()},
        "work": {
            "dtype": "float32",
            "batch": sorted(set(options.batch)),
            "prompt": options.prompt,
            "new_tokens": options.new_tokens,
            "long_prompt": options.long_prompt,
            "repeats": options.repeats,
            "seed": SEED,
        },
        "engines": {},
        "results": [],
    }
    pythons = {}
    for engine in dict.fromkeys(options.engines):
        report["engines"][engine] = {}
        try:
            pythons[engine] = python_of(engine, say)
        except PeerError as error:
            leave_out(report, engine, str(error), say)
    with tempfile.TemporaryDirectory(prefix="amoeba-engine-") as scratch:
        for model in dict.fromkeys(options.models):
            job = make_job(model, Path(scratch), report["work"], cores)
            if "llama.cpp" in pythons:
                write_gguf(Path(job["model_dir"]), Path(job["gguf"]))
            for engine, python in pythons.items():
                if "left_out" in report["engines"][engine]:
                    continue
                try:
                    report["results"] += run_engine(engine, python, job, report["engines"][engine], say)
                except PeerError as error:
                    leave_out(report, engine, f"{model}: {error}", say)
    add_agreement(report, say)
    return report


def leave_out(report: dict[str, Any], engine: str, reason: str, say: Say) -> None:
    say(f"[red]{engine} is left out[/red]: {reason}")
    report["engines"][engine]["left_out"] = reason


def make_job(model: str, scratch: Path, work: dict[str, Any], cores: int) -> dict[str, Any]:
    """Return the job for a script that measures an engine. A job describes a model and the requests to run.

    If the model has random weights, first write them as a checkpoint.
    """
    directory = scratch / model
    if config := MODELS[model]:
        write_random_llama(config, directory, SEED)
    else:
        directory = ensure_default_model()
    shape = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    elements = num_parameters(ModelDims(shape, 1, 16, "float32"))
    tokens = max(max(work["batch"]) * (work["prompt"] + work["new_tokens"]), work["long_prompt"] + 1)
    kv_token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * ITEM
    # An untied embedding is a lookup and not read as a whole.
    table = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    return {
        "model": model,
        "model_dir": str(directory),
        "gguf": str(scratch / f"{model}.gguf"),
        "scratch": str(scratch),
        "seed": f"{SEED} {model}",
        "threads": cores,
        "batches": work["batch"],
        "vocab_size": shape.vocab_size,
        "max_len": min(shape.max_position, max(work["prompt"] + work["new_tokens"], work["long_prompt"] + 1, 2048)),
        "weight_bytes": elements * ITEM,
        "read_bytes": (elements - table) * ITEM,
        "kv_token_bytes": kv_token_bytes,
        "kv_bytes": tokens * kv_token_bytes,
    } | {key: work[key] for key in ("prompt", "new_tokens", "long_prompt", "repeats")}


def run_engine(engine: str, python: Path, job: dict[str, Any], about: dict[str, Any], say: Say) -> list[dict[str, Any]]:
    """Measure an engine with a model, and return one dict for each batch size.

    Also add the versions of the engine to `about`. Raises `PeerError` if the engine fails.
    """
    bandwidth, others = read_bandwidth(), busy_cores()
    say(f"{job['model']}, {engine}: loading ({bandwidth / 1e9:.1f} GB/s read bandwidth)")
    if others > QUIET:
        say(
            f"[yellow]warning[/yellow]: other processes keep {others:.1f} of {job['threads']} cores busy. Threads that "
            f"wait for each other suffer most: such figures do not compare engines"
        )
    results, prefill = [], {}
    with results_of(python, runner_of(engine), job) as lines:
        header = next(lines, None)
        if header is None:
            return []
        about["versions"] = header["versions"]
        for cell in lines:
            if cell["new_tokens"] == 1:
                prefill = {"prefill_tokens_per_s": job["long_prompt"] / median(cell["first_s"])}
                prefill["prefill_s"] = cell["first_s"]
                say(f"{job['model']}, {engine}: prefill {prefill['prefill_tokens_per_s']:.0f} tokens/s")
                continue
            result = figures(cell, job, bandwidth)
            result |= {"loading_peak_bytes": header["loading_peak_bytes"], "cores_busy_before": others}
            results.append({"engine": engine, "model": job["model"]} | result)
            say(f"{job['model']}, {engine}: batch {cell['batch']}, decode {result['decode_tokens_per_s']:.1f} tokens/s")
    return [result | prefill for result in results]


def figures(cell: dict[str, Any], job: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """Return medians and samples of the measurements of one batch size. `cell`: result of `peers.timing.measure`."""
    batch, steps = cell["batch"], job["new_tokens"] - 1
    decode_s = median(cell["total_s"]) - median(cell["first_s"])
    # A step reads the weights once, and the cache of its sequences, on average with half of their output.
    cached = batch * (job["prompt"] + job["new_tokens"] / 2) * job["kv_token_bytes"]
    return {
        "batch": batch,
        "decode_tokens_per_s": batch * steps / decode_s,
        "ttft_s": median(cell["first_s"]),
        "read_bandwidth": bandwidth,
        "bandwidth_share": (job["read_bytes"] + cached) * steps / decode_s / bandwidth,
        "peak_bytes": cell["peak_bytes"],
        "above_weights_bytes": cell["peak_bytes"] - job["weight_bytes"],
        "first_s": cell["first_s"],
        "total_s": cell["total_s"],
        "tokens": cell["tokens"],
    }


@contextmanager
def results_of(python: Path, runner: Path, job: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """Start the script `runner`, send the job to it, and yield an iterator over the results that it writes.

    At the end of the block, the process and its children are killed. Raises `PeerError` with the end of the log if the
    script fails.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [str(python), str(runner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(python),
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(job))
            process.stdin.close()
            yield map(json.loads, process.stdout)
            status = process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status:
            log.seek(0)
            text = log.read()
            print(text[-4000:], file=sys.stderr)
            raise PeerError(f"it ended with status {status}: {last_words(text)}")


def read_bandwidth() -> float:
    """Return the bytes per second that this machine reads from memory, measured in another process."""
    command = [sys.executable, "-c", BANDWIDTH]
    output = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    return float(output)


def busy_cores(seconds: float = 1.0) -> float:
    """Return the mean number of cores that other processes use in the next `seconds`; 0 if the number is unknown."""

    def busy_s() -> float:
        try:
            times = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        except OSError:
            return 0.0
        return (sum(times[:8]) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")  # All but idle and I/O wait.

    before = busy_s()
    time.sleep(seconds)
    return (busy_s() - before) / seconds


def add_agreement(report: dict[str, Any], say: Say) -> None:
    """Replace the tokens in each result by their agreement with the tokens of transformers.

    `equal_tokens` is the share of equal tokens in each request. `equal_requests` is the number of requests in which all
    tokens are equal.
    """
    tokens = {(r["engine"], r["model"], r["batch"]): r.pop("tokens") for r in report["results"]}
    for result in report["results"]:
        reference = tokens.get((BASELINE, result["model"], result["batch"]))
        if reference is None or result["engine"] == BASELINE:
            continue
        own = tokens[result["engine"], result["model"], result["batch"]]
        pairs = list(zip(own, reference, strict=True))
        result["equal_tokens"] = [sum(a == b for a, b in zip(*pair, strict=True)) / len(pair[0]) for pair in pairs]
        result["equal_requests"] = sum(a == b for a, b in pairs)
        early = sum(a[:CHECKED] != b[:CHECKED] for a, b in pairs)
        if early > 1:
            say(
                f"[yellow]warning[/yellow]: {result['model']}, {result['engine']}: batch {result['batch']}, the first "
                f"{CHECKED} tokens of {early} of {len(pairs)} requests are not those of {BASELINE}: not the same work"
            )


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table with a column for each engine, and notes."""
    work, machine = report["work"], report["machine"]
    cells = {(r["engine"], r["model"], r["batch"]): r for r in report["results"]}
    engines = [name for name, about in report["engines"].items() if any(key[0] == name for key in cells)]
    table = Table(
        title=f"f32, greedy, prompts of {work['prompt']} tokens, {work['new_tokens']} new tokens, "
        f"{machine['threads']} threads, median of {work['repeats']}; in brackets: against {BASELINE}"
    )
    for column in ("model", "batch", "", *engines):
        table.add_column(column, justify="right" if column in ("batch", *engines) else "left")
    for model in dict.fromkeys(r["model"] for r in report["results"]):
        for batch in work["batch"]:
            row = {engine: cells[engine, model, batch] for engine in engines if (engine, model, batch) in cells}
            base = row.get(BASELINE, {})
            for index, (label, field, form) in enumerate(ROWS):
                # Prefill of one long prompt does not depend on the batch.
                if field == "prefill_tokens_per_s" and batch != work["batch"][0]:
                    continue
                texts = [form(row[engine], base) if field in row.get(engine, {}) else "" for engine in engines]
                if any(texts):
                    name = label.format(**work)
                    table.add_row("" if index else model, "" if index else str(batch), name, *texts)
            table.add_section()
    console.print(table)
    bandwidths = [r["read_bandwidth"] for r in report["results"]]
    if bandwidths:
        spread = f"{min(bandwidths) / 1e9:.1f} to {max(bandwidths) / 1e9:.1f} GB/s"
        console.print(f"{machine['cpu']}, {machine['threads']} cores, read bandwidth {spread}", highlight=False)
    for engine, about in report["engines"].items():
        versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
        left_out = f"left out: {about['left_out']}" if "left_out" in about else ""
        console.print(f"{engine}: {'; '.join(filter(None, (versions, left_out)))}", highlight=False, markup=False)


def against(field: str, form: str, scale: float = 1.0) -> Callable[[dict[str, Any], dict[str, Any]], str]:
    """Return a function `(result, baseline) -> text` that formats `field` of a result, such as "12.3 (1.05x)".

    The first number is the field multiplied by `scale`, formatted with `form`. The number in brackets is its ratio to
    the baseline.
    """

    def text(result: dict[str, Any], base: dict[str, Any]) -> str:
        plain = format(result[field] * scale, form)
        if result["engine"] == BASELINE or field not in base:
            return plain
        return f"{plain} ({result[field] / base[field]:.2f}x)"

    return text


def equal(result: dict[str, Any], base: dict[str, Any]) -> str:
    shares = result["equal_tokens"]
    return f"{sum(shares) / len(shares):.1%}, {result['equal_requests']} of {len(shares)} requests"


ROWS: tuple[tuple[str, str, Callable[[dict[str, Any], dict[str, Any]], str]], ...] = (
    ("decode, tokens/s", "decode_tokens_per_s", against("decode_tokens_per_s", ".1f")),
    ("  of read bandwidth", "bandwidth_share", lambda result, base: f"{result['bandwidth_share']:.0%}"),
    ("TTFT, ms", "ttft_s", against("ttft_s", ".0f", 1e3)),
    ("prefill of {long_prompt}, tokens/s", "prefill_tokens_per_s", against("prefill_tokens_per_s", ".0f")),
    ("peak memory, MiB", "peak_bytes", against("peak_bytes", ".0f", 2**-20)),
    ("  above the weights", "above_weights_bytes", lambda r, base: f"{r['above_weights_bytes'] / 2**20:.0f}"),
    ("equal tokens", "equal_tokens", equal),
)
"""Label, field and format of each row."""


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    main()
