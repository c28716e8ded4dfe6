"""Steps that were begun, and stay so, in the dispatcher's thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from harness import engine_of, registry_of
from pausing_cases import KINDS, steps, submit

from amoeba_jax import LLM
from amoeba_jax.instances.hidden_states import HiddenStates
from amoeba_jax.instances.pace import ExpectedStep, Pace
from amoeba_jax.instances.site import Site
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.request import Request

HOUR_S = 3600.0


@contextmanager
def long_steps(*, done_early: bool = False) -> Iterator[None]:
    """Steps are expected to take an hour, and seem to, unless `done_early`: `advance` launches the first part, and
    nothing of the next step."""
    with pytest.MonkeyPatch.context() as patch:
        if not done_early:
            patch.setattr(HiddenStates, "is_ready", False)
        patch.setattr(Pace, "expected", lambda pace, begin, *_: ExpectedStep(begin, begin + HOUR_S))
        yield


class Launched:
    """The layers of each program of a segment that was launched, by the first device of its instance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.layers: list[tuple[int, int]] = []
        run = Site.run

        def noted(site: Site, segments: tuple[SegmentPlan, ...], *arguments: Any) -> Any:
            self.layers += [(site.group.start, segment.layers.start) for segment in segments]
            return run(site, segments, *arguments)

        monkeypatch.setattr(Site, "run", noted)

    def of(self, device: int) -> list[int]:
        return [layer for start, layer in self.layers if start == device]


def begin(llm: LLM, asked: list[tuple[list[int], Any]] = KINDS, num_parts: int = 1) -> list[Request]:
    """Requests of which each has a token, with that many parts launched of the next step of every instance."""
    engine, submitted = engine_of(llm), submit(llm, asked)
    steps(llm, lambda: all(r.sequences[0].output for r in submitted))
    while not all(i.begun is not None for i in engine.instances):
        engine.drain()  # a prompt's log-probabilities take a step that is launched at once
        engine.advance()
    for instance in engine.instances:
        for _ in range(num_parts - 1):
            engine.launching.launch(instance)
        assert instance.begun is not None
        assert instance.begun.num_launched == num_parts
    return submitted


def end(llm: LLM, *submitted: list[Request]) -> None:
    registry_of(llm).end([request for each in submitted for request in each])


def num_preemptions(submitted: list[Request]) -> int:
    return sum(sequence.num_preemptions for request in submitted for sequence in request.sequences)
