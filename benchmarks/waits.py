"""Waits of requests for tokens while instances merge and split.

    python benchmarks/waits.py [--models SmolLM2-135M Deep-48] [--devices 4] [--requests 16] [--repeats 3] [--json FILE]

Requests decode on all instances, on virtual devices, with `layers_per_step="auto"`. They are at rest while nothing
changes. If devices share cores, the times of steps vary even at rest. Of the layouts before and after the change, the
slower layout is the one with the longer steps at rest. For the merge and for the split, the table has

- the longest gap between two tokens of a request during the change, in steps of the slower layout.
- the longest gap at rest in the slower layout, in the same unit.
- the duration of the change, relative to a change that switches all layers at once.
- the TTFT of a short prompt that arrives at the start, in the middle and at the end of the change, and its ratio to the
  TTFT at rest in the slower layout.
- the share of cached prompt tokens that are found after the change.
"""

import argparse
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformation import RANDOM_MODELS, REAL_MODEL

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.transform.relayout import Relayout

MAX_NUM_SEQS = 8
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PLACES = ("start", "middle", "end")
_SETTLE_TOKENS = 6
_REST_TOKENS = 12
"""Tokens to generate before and after a change, for comparison: about as many as a change has steps."""


class Watched:
    """Requests with the times at which the engine returns their tokens."""

    def __init__(self, llm: LLM, prompts: list[list[int]], params: SamplingParams):
        self.times: list[list[float]] = [[] for _ in prompts]
        self.ended = threading.Event()
        self.submitted = time.perf_counter()
        self._llm, self._left = llm, len(prompts)
        self._requests = [llm._registry.make(p, params, lambda _: None, None, None) for p in prompts]
        for request, times in zip(self._requests, self.times, strict=True):
            (sequence,) = request.sequences
            sequence.sink = self._timed(times)

    def _timed(self, times: list[float]) -> Callable[[Any], None]:
        def sink(update: Any) -> None:
            times.extend([time.perf_counter()] * len(update.tokens))
            if update.finished:
                self._left -= 1
                if not self._left:
                    self.ended.set()

        return sink

    def submit(self) -> None:
        """Submit the requests. Call it in the dispatcher thread."""
        self.submitted = time.perf_counter()
        self._llm._engine.submit([request.sequences[0] for request in self._requests])

    def start(self) -> "Watched":
        """Submit the requests from another thread, and return this object."""
        self._llm._dispatcher.call(self.submit).result()
        return self

    def wait_for(self, tokens: int) -> None:
        """Wait until each request has `tokens` tokens, or all have ended."""
        while not self.ended.is_set() and any(len(times) < tokens for times in self.times):
            time.sleep(0.002)

    def end(self) -> None:
        """Cancel running requests."""
        engine, sequences = self._llm._engine, [request.sequences[0] for request in self._requests]
        self._llm._dispatcher.call(engine.sequences.finish, sequences, "abort").result()
        self._llm._registry.end(self._requests)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the gaps in seconds between consecutive tokens of a request. Only gaps that overlap the span count."""
        pairs = [pair for times in self.times for pair in itertools.pairwise(times)]
        return [b - a for a, b in pairs if b >= begin and a <= end]

    @property
    def ttft_s(self) -> float:
        return self.times[0][0] - self.submitted


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Return the TTFT of a request in seconds."""
    watched = Watched(llm, [prompt], SHORT).start()
    watched.ended.wait()
    watched.end()
    return watched.ttft_s


def change(llm: LLM, degree: int, prompt: list[int] | None, place: str, layers: int | str = "auto"):
    """Transform, and submit a short request during the change.

    Return the TTFT of the short request in seconds, and the times at which the change began and ended.

    Args:
        prompt: prompt of the short request. None: there is no short request, and the returned TTFT is 0.
        place: part of the change in which the short request is submitted, one of `PLACES`.
        layers: argument `layers_per_step` of `transform`.
    """
    late: list[Watched] = [] if prompt is None else [Watched(llm, [prompt], SHORT)]
    num_layers = llm._engine.dims.config.num_layers
    wanted = {"start": 0, "middle": num_layers // 2, "end": num_layers - 1}[place]
    real, sent = Relayout.switch_layers, threading.Event()

    def switch(self: Relayout, step: StepPlan | None = None) -> None:
        before = self.num_switched
        real(self, step)
        if late and not sent.is_set() and (not before if place == "start" else self.num_switched >= wanted):
            sent.set()
            late[0].submit()

    Relayout.switch_layers = switch
    begin = time.perf_counter()
    try:
        llm.transform(degree, layers_per_step=layers)  # pyright: ignore[reportArgumentType]
    finally:
        Relayout.switch_layers = real
    end = time.perf_counter()
    for each in late:
        each.ended.wait()
        each.end()
    return (late[0].ttft_s if late else 0.0), begin, end


def measure(llm: LLM, devices: int, num_requests: int, repeats: int) -> dict[str, Any]:
    random, vocab = np.random.default_rng(0), llm._engine.dims.config.vocab_size
    prompts = [random.integers(3, vocab, 64).tolist() for _ in range(num_requests)]
    short = [random.integers(3, vocab, 24).tolist() for _ in range(200)]
    found: dict[str, Any] = {"gap_steps": {}, "rest_gap_steps": {}, "whole": {}, "rest_s": {}, "ttft_s": {}}
    llm.warmup([1, devices])

    def running() -> Watched:
        watched = Watched(llm, prompts, LONG).start()
        watched.wait_for(_SETTLE_TOKENS)
        return watched

    for name, degree, other in (("merge", 1, devices), ("split", devices, 1)):
        seconds: dict[str, list[float]] = {}
        for _ in range(repeats):
            for layers in ("auto", llm._engine.dims.config.num_layers):
                llm.transform(degree)
                watched = running()
                watched.wait_for(max(map(len, watched.times)) + _REST_TOKENS)
                rest = [watched.gaps(watched.times[0][2], time.perf_counter())]
                _, begin, end = change(llm, other, None, "start", layers)
                watched.wait_for(max(map(len, watched.times)) + 2)
                after = time.perf_counter()
                watched.wait_for(max(map(len, watched.times)) + _REST_TOKENS)
                rest.append(watched.gaps(after, time.perf_counter()))
                seconds.setdefault(str(layers), []).append(end - begin)
                if layers == "auto":
                    slower = max(rest, key=median)
                    seconds.setdefault("gap", []).append(max(watched.gaps(begin, end)) / median(slower))
                    seconds.setdefault("rest_gap", []).append(max(slower) / median(slower))
                watched.end()
            for place in PLACES:
                llm.transform(degree)
                watched = running()
                seconds.setdefault("rest", []).append(first_token(llm, short.pop()))
                ttft_s, _, _ = change(llm, other, short.pop(), place)
                seconds.setdefault(place, []).append(ttft_s)
                seconds.setdefault("after", []).append(first_token(llm, short.pop()))
                watched.end()
        found["gap_steps"][name] = median(seconds["gap"])
        found["rest_gap_steps"][name] = median(seconds["rest_gap"])
        found["whole"][name] = median(seconds["auto"]) / median(seconds[str(llm._engine.dims.config.num_layers)])
        found["rest_s"][name] = {"before": median(seconds["rest"]), "after": median(seconds["after"])}
        found["ttft_s"][name] = {place: median(seconds[place]) for place in PLACES}
    found["prefix"] = prefixes(llm, devices, [random.integers(3, vocab, 128).tolist() for _ in range(16)])
    return found


def prefixes(llm: LLM, devices: int, prompts: list[list[int]]) -> dict[str, float]:
    """Return the share of prompt tokens found in the prefix cache before a merge, after the merge and after a split."""
    llm.transform(1)
    llm.generate(prompts, SHORT)
    shares = {}
    for name, degree in (("before", 1), ("merged", devices), ("split", 1)):
        llm.transform(degree)
        before = llm.stats.cached_tokens
        llm.generate([[*prompt, 5] for prompt in prompts], SHORT)
        shares[name] = (llm.stats.cached_tokens - before) / sum(map(len, prompts))
    return shares


def show(name: str, found: dict[str, Any]) -> None:
    table = Table(title=name)
    for column in ("", "merge", "split"):
        table.add_column(column)
    both = ("merge", "split")
    table.add_row("longest gap, steps", *(f"{found['gap_steps'][kind]:.2f}" for kind in both))
    table.add_row("longest gap at rest, steps", *(f"{found['rest_gap_steps'][kind]:.2f}" for kind in both))
    table.add_row("whole, of all layers at once", *(f"{found['whole'][kind]:.2f}x" for kind in both))
    rest = found["rest_s"]
    table.add_row("TTFT at rest before, ms", *(f"{rest[kind]['before'] * 1e3:.0f}" for kind in both))
    table.add_row("TTFT at rest after, ms", *(f"{rest[kind]['after'] * 1e3:.0f}" for kind in both))
    for place in PLACES:
        cells = []
        for kind in both:
            ttft_s, slower_s = found["ttft_s"][kind][place], max(rest[kind].values())
            cells.append(f"{ttft_s * 1e3:.0f} ({ttft_s / slower_s:.2f}x of the slower)")
        table.add_row(f"TTFT at the {place}, ms", *cells)
    prefix = found["prefix"]
    table.add_row("cached tokens found", f"{prefix['merged']:.0%}", f"{prefix['split']:.0%}")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=RANDOM_MODELS, nargs="+", default=["SmolLM2-135M", "Deep-48"])
    parser.add_argument("--devices", type=int, choices=(2, 4), default=4)
    parser.add_argument("--requests", type=int, default=16, help="number of requests, a multiple of the devices")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.requests % options.devices or not 0 < options.requests < MAX_NUM_SEQS * options.devices:
        parser.error(f"--requests: a multiple of {options.devices} below {MAX_NUM_SEQS} a device: others come beside")
    results = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as directory:
            source: dict[str, Any] = {"model": REAL_MODEL.get(name, directory)}
            if name not in REAL_MODEL:
                Path(directory, "config.json").write_text(json.dumps(RANDOM_MODELS[name]), encoding="utf-8")
                source["load_format"] = "random"
            settings = {"kv_cache_tokens": 8192, "max_model_len": 1024, "max_num_seqs": MAX_NUM_SEQS, "progress": False}
            with LLM(num_devices=options.devices, **source, **settings) as llm:
                results[name] = measure(llm, options.devices, options.requests, options.repeats)
        show(f"{name}, {options.devices} devices", results[name])
    if options.json:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
