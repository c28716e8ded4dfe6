"""Requests that pause, driven step by step in the dispatcher thread."""

from collections.abc import Callable
from typing import Any

import numpy as np
from harness import engine_of, registry_of
from serving_checks import forget_prefixes
from transform_cases import tokens

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.instances.instance import Instance
from amoeba_jax.request import Request
from amoeba_jax.transform.options import RunningRequests, TransformOptions
from amoeba_jax.transform.report import TransformReport

ALL = (0, 1, 2, 3)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 200, length).tolist()


def greedy(max_tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **settings)


KINDS: list[tuple[list[int], SamplingParams]] = [
    (prompt(9, 1), greedy(40)),
    (prompt(70, 2), greedy(30)),
    (prompt(7, 3), SamplingParams(temperature=0.9, seed=7, n=2, max_tokens=40, ignore_eos=True)),
    (prompt(6, 4), greedy(40, repetition_penalty=1.4)),
    (prompt(11, 5), greedy(30, prompt_logprobs=2, logprobs=2)),
    (prompt(5, 6), SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5, max_tokens=50, ignore_eos=True)),
]
URGENT = prompt(100, 7), greedy(12, priority=-1)


def options(degree: int, running: RunningRequests = "migrate", release: bool = False) -> TransformOptions:
    return TransformOptions(degree, ALL, release_weights=release, running=running)


def submit(llm: LLM, asked: list[tuple[list[int], SamplingParams]]) -> list[Request]:
    requests = [registry_of(llm).make(p, params, lambda _: None, None, None) for p, params in asked]
    for request in requests:
        engine_of(llm).submit([request.sequences[0]])
    return requests


def outputs(requests: list[Request]) -> list[list[tuple[int, ...]]]:
    return [[tuple(sequence.output) for sequence in request.sequences] for request in requests]


def steps(llm: LLM, until: Callable[[], bool], most: int = 1000) -> None:
    engine = engine_of(llm)
    for _ in range(most):
        if until():
            return
        engine.advance()
        engine.drain()
    raise AssertionError("it never came to that")


def done(requests: list[Request]) -> bool:
    return all(sequence.finished for request in requests for sequence in request.sequences)


def transform(llm: LLM, what: TransformOptions) -> TransformReport:
    engine = engine_of(llm)
    future = engine.transform(what)
    engine.end_transformations()
    return future.result()


def expected_of(llm: LLM, asked: list[tuple[list[int], SamplingParams]]) -> list[list[tuple[int, ...]]]:
    found = tokens([llm.generate(p, params)[0] for p, params in asked])
    forget_prefixes(llm)
    return found


def expected_of_group(llm: LLM, asked: list[tuple[list[int], SamplingParams]]) -> list[list[tuple[int, ...]]]:
    """Return the tokens of requests that fit only on an instance over all devices."""
    llm.set_layout(4)
    found = expected_of(llm, asked)
    llm.set_layout(1)
    return found


def state_of(instance: Instance) -> list[Any]:
    return [(s.slot, s.num_computed, s.pages.table.tolist(), len(s.output)) for s in instance.running if s.pages]
