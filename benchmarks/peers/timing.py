"""Measurements of one engine, by the same rules for all engines.

This module uses only the standard library, because it runs in the environment of each engine.

All requests of a batch arrive at once. `T(n)` is the time until each request of the batch has n new tokens.

- TTFT: `T(1)`, the time until *every* request of the batch has its first token.
- decode tokens/s: `batch * (new_tokens - 1) / (T(new_tokens) - T(1))`.
- prefill tokens/s: the length of one long prompt, divided by `T(1)`.

A cell is a combination of batch size, prompt tokens and new tokens. An untimed run precedes the timed runs of each
cell. Each run has new prompts, so that no prompt cache helps. All engines have the same prompts.
"""

import json
import os
import platform
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Job = dict[str, Any]
Prompts = list[list[int]]


class Engine(Protocol):
    versions: dict[str, str]

    def start_cell(self, batch: int, tokens: int) -> None:
        """Prepare for `batch` requests of at most `tokens` tokens, prompt and output together.

        This call is not timed.
        """

    def generate(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """Complete all prompts as one greedy batch, and return the new tokens of each prompt. Ignore end tokens."""


def main(load: Callable[[Job], Engine]) -> None:
    """Read a job from stdin, and write JSON to stdout: one line about the engine, then one line for each cell."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Engines print to stdout too.

    def report(result: dict[str, Any]) -> None:
        lines.write(json.dumps(result) + "\n")

    job = json.load(sys.stdin)
    reset_peak()
    engine = load(job)
    report({"versions": {"python": platform.python_version()} | engine.versions, "loading_peak_bytes": peak_bytes()})
    for batch in job["batches"]:
        report(measure(engine, job, batch, job["prompt"], job["new_tokens"]))
    report(measure(engine, job, 1, job["long_prompt"], 1))
    os._exit(0)  # All results are written; some engines fail to shut down.


def measure(engine: Engine, job: Job, batch: int, prompt: int, new_tokens: int) -> dict[str, Any]:
    """Measure one cell. `first_s` of the result has samples of `T(1)`, and `total_s` has samples of `T(new_tokens)`."""

    def run(kind: str, count: int) -> tuple[float, list[list[int]]]:
        chance = random.Random(f"{job['seed']} {batch} {prompt} {kind}")
        prompts = [[chance.randrange(job["vocab_size"]) for _ in range(prompt)] for _ in range(batch)]
        start = time.perf_counter()
        outputs = engine.generate(prompts, count)
        elapsed = time.perf_counter() - start
        if [len(output) for output in outputs] != [count] * batch:
            raise RuntimeError(f"asked for {count} tokens of {batch} requests, got {[len(o) for o in outputs]}")
        return elapsed, outputs

    engine.start_cell(batch, prompt + new_tokens)
    run("warm-up", new_tokens)
    reset_peak()
    first_s, total_s, tokens = [], [], []
    for repeat in range(job["repeats"]):
        first_s.append(run(f"first {repeat}", 1)[0])
        if new_tokens > 1:
            elapsed, outputs = run(f"all {repeat}", new_tokens)
            total_s.append(elapsed)
            tokens += [[int(token) for token in output] for output in outputs]
    cell = {"batch": batch, "prompt": prompt, "new_tokens": new_tokens, "first_s": first_s, "total_s": total_s}
    return cell | {"tokens": tokens, "peak_bytes": peak_bytes()}


def reset_peak() -> None:
    """Reset the peak of resident memory to the present value, if the system supports it."""
    for process in _processes():
        try:
            (process / "clear_refs").write_text("5")
        except OSError:
            return  # Then the peak is of the whole run.


def peak_bytes() -> int:
    """Return the peak resident bytes since `reset_peak`, summed over this process and its children.

    Pages of mapped files count. Pages that processes share count once for each process.
    """
    peak = 0
    for process in _processes():
        try:
            status = (process / "status").read_text()
        except OSError:
            continue  # The process has ended.
        peak += sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))
    # Not Linux: macOS counts bytes, others KiB.
    return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def _processes() -> list[Path]:
    """Return the `/proc` directories of this process and its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {os.getpid()} if parents else set()
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return [Path("/proc") / str(pid) for pid in sorted(found)]
