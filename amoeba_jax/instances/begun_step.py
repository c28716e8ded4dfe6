"""A step whose programs are launched a few at a time, so that there is little to wait for on its devices."""

import time
from dataclasses import replace
from typing import NamedTuple

import jax

from amoeba_jax.instances.pace import ExpectedStep
from amoeba_jax.instances.runner import PreparedPart, StepInputs
from amoeba_jax.instances.step_plan import Row, StepPlan
from amoeba_jax.instances.step_sampler import SampleCall


class PreparedStep(NamedTuple):
    """All that a step needs before its first program is launched.

    Attributes:
        sampled: rows whose next token it chooses.
    """

    inputs: StepInputs
    sampled: list[Row]
    sample: SampleCall | None
    take_column: jax.stages.Compiled | None
    token_logprobs: jax.stages.Compiled | None


class BegunStep:
    """A step of an instance in steady state, of which not all programs have been launched.

    Its sequences are as before it: what they computed counts when all of it has been launched.

    Args:
        num_parts: in how many it is launched, at most one for each segment of the layers and one for the head.
        expected: when it computes.

    Attributes:
        launched_at: as that of `PendingStep`.
        runs_until: when what was launched of it is expected to have run, by `time.perf_counter()`.
        num_launched: segments that were.
    """

    def __init__(self, plan: StepPlan, prepared: PreparedStep, num_parts: int, expected: ExpectedStep):
        (work,) = prepared.inputs.work
        assert isinstance(work, PreparedPart), "all layers have one home"
        self.plan, self.prepared = plan, prepared
        self.launched_at, self.runs_until = time.perf_counter(), expected.begins_at
        self.num_launched = 0
        self._launched_s = 0.0  # what was launched and is not known to have run takes that long
        self._part_s = (expected.ends_at - expected.begins_at) / num_parts
        self._waited = False  # whether its devices waited for the part that was launched last
        self._has_resumed = False  # since then
        units = len(work.programs) + 1  # the head is the last
        self._ends = [part * units // num_parts for part in range(1, num_parts)]
        self._pages = [row.sequence.pages for row in plan.rows]

    def next_part(self) -> slice | None:
        """The segments of the next part, which are launched now; None where those left are of the last."""
        if not self._ends:
            return None
        self.runs_until = max(self.runs_until, time.perf_counter()) + self._part_s
        self._launched_s += self._part_s
        first, self.num_launched = self.num_launched, self._ends.pop(0)
        return slice(first, self.num_launched)

    def began(self, at_s: float) -> None:
        """Take note of when its devices had computed the step before, in seconds of `time.perf_counter`."""
        self.runs_until = at_s + self._launched_s

    def devices_wait(self, wait: bool) -> None:
        """Take note, before a part is launched, of whether its devices have run what was launched and wait for it.

        Where they waited for two parts in a row, its other parts take half as long as expected. (For one it may be by
        chance: parts that are launched sooner than needed are what an urgent request has to wait for. After a pause
        they always do.)
        """
        if wait:
            self.runs_until, self._launched_s = time.perf_counter(), 0.0
            if self._waited:
                self._part_s /= 2
        self._waited, self._has_resumed = wait and not self._has_resumed, False

    def resumed(self) -> None:
        """Take note that its devices have computed something else meanwhile."""
        waited = max(time.perf_counter() - self.runs_until, 0.0)
        self.launched_at += waited
        self.runs_until += waited
        self._waited, self._has_resumed = False, True

    @property
    def has_rows(self) -> bool:
        """Whether any of its sequences has the pages that it had at first."""
        rows = zip(self.plan.rows, self._pages, strict=True)
        return any(row.sequence.pages is pages for row, pages in rows)

    def left(self) -> tuple[StepPlan, list[Row]]:
        """The plan, and the rows that sample, without sequences that have lost the pages that they had at first."""
        rows = zip(self.plan.rows, self._pages, strict=True)
        gone = {row.place for row, pages in rows if row.sequence.pages is not pages}
        plan = replace(self.plan, rows=tuple(row for row in self.plan.rows if row.place not in gone))
        return plan, [row for row in self.prepared.sampled if row.place not in gone]
