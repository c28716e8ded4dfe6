"""TTFT of urgent requests with the policy `flying` while best-effort requests fill all slots.

    python benchmarks/urgent.py [--model smollm2-135m] [--urgent 9] [--preemption hard] [--json urgent.json]

The benchmark uses 4 virtual devices with all weights kept. For comparison, the urgent prompts first run one after the
other on an idle TP4 instance. Then best-effort requests fill all slots of 4 x TP1, and more best-effort requests wait.
Urgent requests arrive one after the other. Each urgent request pauses the best-effort requests and gets a TP4 instance.
With `--stream-s`, urgent requests follow each other without a break, and `--max-pause-s` limits the pauses.

The table has the TTFTs that the engine measured. For each urgent request, it also has the longest gap between two
tokens of a best-effort request, minus the duration of the urgent request. Tokens are timed when the engine returns
them, and again when the threads of the clients receive them.

The exit code is 1 if tokens differ from undisturbed runs, if a request is lost, or if a best-effort request is
recomputed with `--preemption hard`. With `--stream-s 60`, the run takes 9 minutes on two cores.
"""

import argparse
import itertools
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, RequestOutput, SamplingParams
from amoeba_jax.instances.sequence import Update
from serving.runtime.metrics import ServerMetrics
from serving.runtime.scheduling import Scheduling
from serving.runtime.scheduling_config import SchedulingConfig

DEVICES = 4
SETTLE_TOKENS = 8


def greedy(max_tokens: int, priority: int = 0) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, priority=priority)


class HandedOut:
    """Times at which the engine returns tokens, by id of the request."""

    def __init__(self, llm: LLM):
        self.times: dict[str, list[float]] = defaultdict(list)
        self._sequences = llm._engine.sequences
        self._report = self._sequences.report
        self._sequences.report = self._noted

    def _noted(self, update: Update) -> None:
        if update.tokens:
            self.times[update.sequence.request_id].append(time.perf_counter())
        self._report(update)

    def close(self) -> None:
        self._sequences.report = self._report


class BestEffort:
    """Best-effort requests, each read by its own thread, and the time of each token."""

    def __init__(self, llm: LLM, prompts: list[list[int]], params: SamplingParams):
        self.times: list[list[float]] = [[] for _ in prompts]
        self.outputs: list[RequestOutput | None] = [None] * len(prompts)
        self.ids = [f"best-effort-{index}" for index in range(len(prompts))]
        self._threads = [
            threading.Thread(target=self._run, args=(llm, index, prompt, params), daemon=True)
            for index, prompt in enumerate(prompts)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, llm: LLM, index: int, prompt: list[int], params: SamplingParams) -> None:
        for output in llm.stream(prompt, params, request_id=self.ids[index]):
            self.times[index].append(time.perf_counter())
            self.outputs[index] = output

    def wait(self) -> list[RequestOutput]:
        """Wait for the end of all requests, and return their last outputs."""
        for thread in self._threads:
            thread.join()
        return [output for output in self.outputs if output is not None]


def gaps(times: Iterable[list[float]], begin: float, end: float) -> list[float]:
    """Return the gaps in seconds between consecutive tokens of a request. Only gaps that overlap the span count."""
    pairs = [pair for each in times for pair in itertools.pairwise(each)]
    return [b - a for a, b in pairs if b >= begin and a <= end]


def timed(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[RequestOutput, float, float]:
    """Serve one request. Return its output, and the times at which the call began and ended."""
    begin = time.perf_counter()
    return llm.generate(prompt, params)[0], begin, time.perf_counter()


def num_preemptions(outputs: list[RequestOutput]) -> int:
    return sum(output.metrics.num_preemptions for output in outputs)


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def beyond(times: list[list[float]], spans: list[tuple[float, float]], step_s: float) -> list[float]:
    """Return for each urgent request, in steps: the longest gap that overlaps the request, minus its duration.

    A gap is the time between two consecutive tokens of a best-effort request.

    Args:
        times: times of the tokens of each best-effort request.
        spans: begin and end of each urgent request.
        step_s: seconds of a step.
    """
    return [(max(gaps(times, *span), default=0.0) - (span[1] - span[0])) / step_s for span in spans]


def run(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    """Run urgent requests on an idle instance, then beside best-effort requests, and return the measurements."""
    dice = np.random.default_rng(options.seed)
    vocabulary = llm.dims.config.vocab_size
    count = DEVICES * options.max_num_seqs + options.waiting
    many = dice.integers(3, vocabulary, (count, options.prompt)).tolist()
    urgent = dice.integers(3, vocabulary, (options.urgent, options.urgent_prompt)).tolist()
    params, urgent_params = greedy(options.best_effort_tokens), greedy(options.urgent_tokens, priority=-1)
    expected = tokens(llm.generate(many, params))
    llm.transform(DEVICES, release_weights=False)
    timed(llm, urgent[0], urgent_params)
    idle = [timed(llm, prompt, urgent_params) for prompt in urgent]
    llm.transform(1)

    settings = SchedulingConfig(
        "flying", preemption=options.preemption, calm_requests=1e-6, max_pause_s=options.max_pause_s
    )
    scheduling = Scheduling(llm, settings, ServerMetrics())
    handed_out = HandedOut(llm)
    best_effort = BestEffort(llm, many, params)
    while sum(len(times) >= SETTLE_TOKENS for times in best_effort.times) < DEVICES * options.max_num_seqs:
        time.sleep(0.01)  # Wait until the instances have measured their steps.
    rest_begin = time.perf_counter()
    time.sleep(options.rest_s)
    rest = rest_begin, time.perf_counter()
    found, spans = [], []
    stream_end = time.perf_counter() + options.stream_s
    for prompt in itertools.cycle(urgent):
        if len(found) >= len(urgent) and time.perf_counter() > stream_end:
            break
        output, begin, end = timed(llm, prompt, urgent_params)
        found.append(output)
        spans.append((begin, end))
        print(f"urgent request {len(found)}: first token after {output.metrics.ttft_s:.3f} s", file=sys.stderr)
        if not options.stream_s:
            time.sleep(options.rest_s)
    saturated = sum(view.running + view.paused for view in llm.instances) > 0
    outputs = best_effort.wait()
    scheduling.close()
    handed_out.close()
    alone = tokens([output for output, _, _ in idle])
    # The span of an urgent request ends with its last token.
    own = [(begin, handed_out.times[o.request_id][-1]) for o, (begin, _) in zip(found, spans, strict=True)]
    by_engine = [handed_out.times[id] for id in best_effort.ids]
    at_rest, by_clients = (
        gaps([[at for at in each if at <= rest[1]] for each in times], *rest)
        for times in (by_engine, best_effort.times)
    )
    step_s = median(at_rest)
    return {
        "idle_ttft_s": [output.metrics.ttft_s for output, _, _ in idle],
        "urgent_ttft_s": [output.metrics.ttft_s for output in found],
        "urgent_s": [end - begin for begin, end in spans],
        "step_s": step_s,
        "rest_gaps_s": sorted(at_rest),
        "beyond_urgent_steps": beyond(by_engine, own, step_s),
        "beyond_urgent_steps_by_clients": beyond(best_effort.times, spans, median(by_clients)),
        "longest_gap_s": max(gaps(best_effort.times, rest_begin, time.perf_counter())),
        "num_urgent": len(found),
        "saturated_to_the_end": saturated,
        "urgent_tokens_equal": all(a == b for a, b in zip(tokens(found), itertools.cycle(alone), strict=False)),
        "best_effort_tokens_equal": tokens(outputs) == expected,
        "best_effort_ended": len(outputs),
        "best_effort": count,
        "best_effort_computed_again": num_preemptions(outputs),
        "urgent_computed_again": num_preemptions(found),
    }  # fmt: skip


def median_and_worst(found: dict[str, Any], which: str) -> str:
    steps = found[f"beyond_urgent_steps{which}"]
    return f"{median(steps):.2f}, {max(steps):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device-memory", default="2GiB")
    parser.add_argument("--max-num-seqs", type=int, default=4, help="requests of each device")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a best-effort prompt")
    parser.add_argument("--best-effort-tokens", type=int, default=600)
    parser.add_argument("--waiting", type=int, default=4, help="best-effort requests beyond the slots")
    parser.add_argument("--urgent", type=int, default=9)
    parser.add_argument("--urgent-prompt", type=int, default=64)
    parser.add_argument("--urgent-tokens", type=int, default=16)
    parser.add_argument("--preemption", choices=("hard", "soft", "sequential"), default="hard")
    parser.add_argument("--max-pause-s", type=float, default=60.0)
    parser.add_argument("--stream-s", type=float, default=0.0, help="seconds of urgent requests without a break")
    parser.add_argument("--rest-s", type=float, default=1.0, help="seconds between two urgent requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with LLM(
        options.model,
        num_devices=DEVICES,
        device_memory=options.device_memory,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=128,
        max_model_len=1024,
        prefix_caching=False,
        prepare_pausing=True,
        progress=False,
    ) as llm:
        llm.warmup()
        run(llm, argparse.Namespace(**{**vars(options), "urgent": 2, "best_effort_tokens": 200, "stream_s": 0.0}))
        found = run(llm, options)
    times_s = found["urgent_ttft_s"]
    idle_s, urgent_s = mean(found["idle_ttft_s"]), mean(times_s)
    table = Table("", "", title=f"{options.model}, {DEVICES} devices, {options.preemption}", show_header=False)
    table.add_row("TTFT on an idle TP4 instance, mean", f"{1e3 * idle_s:.1f} ms")
    table.add_row(f"TTFT of {found['num_urgent']} urgent requests: mean, median, longest",
                  ", ".join(f"{1e3 * it:.1f} ms" for it in (urgent_s, median(times_s), max(times_s))))  # fmt: skip
    table.add_row("ratio of means, of medians",
                  f"{urgent_s / idle_s:.2f}, {median(times_s) / median(found['idle_ttft_s']):.2f}")  # fmt: skip
    rest_s, step_s = found["rest_gaps_s"], found["step_s"]
    table.add_row("gaps of best-effort requests at rest: median", f"{1e3 * step_s:.1f} ms")
    longest = (*np.quantile(rest_s, (0.9, 0.99)), rest_s[-1])
    table.add_row("    90%, 99%, longest, steps", ", ".join(f"{it / step_s:.2f}" for it in longest))
    table.add_row("longest gap beyond the urgent request's time, steps: median, worst", median_and_worst(found, ""))
    table.add_row("    as clients' threads have tokens", median_and_worst(found, "_by_clients"))
    table.add_row("longest gap of all", f"{found['longest_gap_s']:.2f} s")
    table.add_row("best-effort requests that ended", f"{found['best_effort_ended']} of {found['best_effort']}")
    table.add_row("computed again: best-effort, urgent",
                  f"{found['best_effort_computed_again']}, {found['urgent_computed_again']}")  # fmt: skip
    for name in ("saturated_to_the_end", "urgent_tokens_equal", "best_effort_tokens_equal"):
        table.add_row(name.replace("_", " "), "yes" if found[name] else "NO")
    Console(width=110).print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    again = options.preemption == "hard" and found["best_effort_computed_again"]
    if (
        again
        or found["best_effort_ended"] < found["best_effort"]
        or not (found["urgent_tokens_equal"] and found["best_effort_tokens_equal"])
    ):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
