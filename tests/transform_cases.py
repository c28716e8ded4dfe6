"""Shared parts of transformation tests: an engine, requests of every kind, and calls in the background."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from harness import engine_of, in_dispatcher
from serving_checks import TIMEOUT_S

from amoeba_jax import LLM, RequestOutput, SamplingParams
from amoeba_jax.instances.runner import Runner
from amoeba_jax.prompts import Prompt
from amoeba_jax.transform.relayout import Relayout

SETTINGS: dict[str, Any] = {
    "device_memory": "4MiB",
    "page_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "max_model_len": 128,
    "segment_layers": 1,
    "progress": False,
}
# Settings of engines in several modules. Equal sizes make equal programs, so the compile cache has them.
SHARED: dict[str, Any] = {"kv_cache_tokens": 224 * SETTINGS["page_size"], "phase_pages": 16}

# Models for the fixture `model_name`.
DENSE, EXPERTS = "llama2", "qwen3-moe"
EXPERTS_FIRST = [EXPERTS, pytest.param(DENSE, marks=pytest.mark.slow)]


def make(directory: Path, compile_cache: str, **changes: Any) -> LLM:
    return LLM(directory, compile_cache=compile_cache, **{**SETTINGS, "num_devices": 4, **changes})


def requests(count: int, seed: int = 0, max_tokens: int = 48) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and settings of every kind. Half of the prompts have a common prefix."""
    random = np.random.default_rng(seed)
    shared = random.integers(3, 200, 13).tolist()
    prompts, params = [], []
    for index in range(count):
        own = random.integers(3, 200, random.integers(1, 30)).tolist()
        prompts.append(shared + own if index % 2 else own)
        kinds = [
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            SamplingParams(temperature=1, seed=index, max_tokens=max_tokens, ignore_eos=True),
            SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=max_tokens, ignore_eos=True),
            SamplingParams(temperature=0.8, seed=index, n=2, max_tokens=max_tokens, ignore_eos=True, logprobs=1),
        ]
        params.append(kinds[index % len(kinds)])
    return prompts, params


def tokens(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[tuple(output.token_ids) for output in request.outputs] for request in outputs]


class Background:
    """`generate` in a separate thread.

    Attributes:
        asked: prompts and their settings.
    """

    def __init__(self, llm: LLM, prompts: list[Prompt], params: Any, **arguments: Any):
        self.asked = prompts, params
        self.outputs: list[RequestOutput] = []
        self.error: BaseException | None = None

        def run() -> None:
            try:
                self.outputs = llm.generate(prompts, params, **arguments)
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self) -> list[RequestOutput]:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the requests never ended"
        if self.error is not None:
            raise self.error
        return self.outputs


def wait_until_decoding(llm: LLM, count: int) -> None:
    """Wait until `count` sequences run and have a token."""

    def number() -> int:
        running = [s for instance in engine_of(llm).instances for s in instance.running]
        return sum(bool(sequence.output) for sequence in running)

    deadline = time.monotonic() + TIMEOUT_S
    while llm._dispatcher.call(number).result(TIMEOUT_S) < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def decoding(
    llm: LLM, count: int, asked: tuple[list[Prompt], Any], tp: int = 1
) -> tuple[Background, list[list[tuple[int, ...]]]]:
    """Start requests at degree `tp`. Wait until `count` sequences decode. Return the call and the expected tokens."""
    expected = undisturbed(llm, asked)
    if tp > 1:
        llm.transform(tp)
    running = Background(llm, *asked)
    wait_until_decoding(llm, count)
    return running, expected


_UNDISTURBED: WeakKeyDictionary[LLM, dict[str, list[list[tuple[int, ...]]]]] = WeakKeyDictionary()


def undisturbed(llm: LLM, asked: tuple[list[Prompt], Any]) -> list[list[tuple[int, ...]]]:
    """Return the tokens of requests without any changes. Each engine generates them once."""
    known = _UNDISTURBED.setdefault(llm, {})
    if (name := repr(asked)) not in known:
        known[name] = tokens(llm.generate(*asked))
    return known[name]


def kv_of(llm: LLM) -> dict[str, list[np.ndarray]]:
    """Return computed keys and values of each running sequence, as `[tokens, heads, 2, head_dim]` for each layer."""

    def read() -> dict[str, list[np.ndarray]]:
        engine_of(llm).drain()
        found = {}
        for instance in engine_of(llm).instances:
            shape = llm.dims.pages.sub_page_shape(instance.tp)
            for sequence in instance.running:
                layers = []
                for extents in instance.site.kv:
                    shards = [
                        np.concatenate(
                            [np.asarray(e.addressable_shards[rank].data).reshape(-1, *shape) for e in extents]
                        )
                        for rank in range(instance.tp)
                    ]
                    pages = [shard[row] for shard, row in zip(shards, sequence.pages.table, strict=True)]
                    whole = np.concatenate(pages, axis=1)  # [pages, heads, 2, page_size, head_dim]
                    by_token = whole.transpose(0, 3, 1, 2, 4).reshape(-1, *whole.shape[1:3], whole.shape[4])
                    layers.append(by_token[: sequence.num_computed].copy())
                found[sequence.request_id] = layers
        return found

    return in_dispatcher(llm, read)


def transition_of(llm: LLM, runner: Runner) -> Relayout | None:
    """Return the transition whose steps a runner runs, or None."""
    present = [instance for instance in llm._engine.instances if instance.transition is not None]
    return next((instance.transition for instance in present if instance.runner is runner), None)


def after_each_switch(monkeypatch: pytest.MonkeyPatch, call: Callable[[Relayout], None]) -> None:
    """Call a function in the dispatcher thread after each layer has switched."""
    switch = Relayout._switch_layer

    def wrapped(transition: Relayout, *arguments: Any) -> None:
        switch(transition, *arguments)
        call(transition)

    monkeypatch.setattr(Relayout, "_switch_layer", wrapped)
