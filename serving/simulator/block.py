"""Block: a series of similar steps of a simulated instance, which the simulator plans at once."""

import math

from serving.simulator.run import Run


class Block:
    """Series of steps that run the same requests on a simulated instance.

    A step that computes prompts is a block of its own. If layers switch before a step, it is also a block of its own.

    Attributes:
        start_s: start of the first step.
        steps: number of steps.
        first_s: seconds of the first step.
        slope_s: seconds by which each step is longer than the step before, because contexts grow.
        plain_s: seconds that the first step would take without prompts and layer switches.
        chunks: pair (request, number of tokens) for each prompt chunk of the first step.
        switches: number of layers that a merge or split switches before the first step.
        interference_s: seconds by which prompts delay the decoding requests in the first step. 0 if no request decodes.
        switch_s: seconds that layer switches add to the first step.
    """

    __slots__ = (
        "chunks",
        "first_s",
        "interference_s",
        "plain_s",
        "slope_s",
        "start_s",
        "steps",
        "switch_s",
        "switches",
    )

    def __init__(self, start_s: float, steps: int, first_s: float, slope_s: float = 0.0):
        self.start_s, self.steps, self.first_s, self.slope_s = start_s, steps, first_s, slope_s
        self.plain_s = first_s
        self.chunks: list[tuple[Run, int]] = []
        self.switches = 0
        self.interference_s = self.switch_s = 0.0

    def time_s(self, steps: int) -> float:
        """Return the total seconds of the first `steps` steps."""
        return steps * self.first_s + self.slope_s * steps * (steps - 1) / 2

    @property
    def end_s(self) -> float:
        """Time at which the last step ends."""
        return self.start_s + self.time_s(self.steps)

    def done(self, now_s: float) -> int:
        """Return the number of steps that have ended at `now_s`."""
        whole = int(self._position(now_s - self.start_s) + 1e-9)
        return min(max(whole, 0), self.steps)

    def cut(self, now_s: float) -> bool:
        """Drop the steps that have not begun at `now_s`. Return whether a step was dropped."""
        elapsed_s = now_s - self.start_s
        begun = 0 if elapsed_s <= 0 else max(math.ceil(self._position(elapsed_s) - 1e-9), 1)
        if begun >= self.steps:
            return False
        self.steps = begun
        return True

    def rest(self, now_s: float) -> "Block | None":
        """Return the step that is running at `now_s` as a new block, or None if no step is running.

        Drop the steps that have not begun. The running step also stays in this block. If there is a new block, the
        caller must subtract 1 from `self.steps`, so that the running step is in the new block only.
        """
        self.cut(now_s)
        if self.steps == 0:
            self.chunks, self.switches = [], 0
        if now_s >= self.end_s - 1e-12:
            return None
        before = self.steps - 1
        step = Block(self.start_s + self.time_s(before), 1, self.first_s + self.slope_s * before)
        step.plain_s = self.plain_s + self.slope_s * before
        step.chunks, step.switches = self.chunks, self.switches
        step.interference_s, step.switch_s = self.interference_s, self.switch_s
        if before == 0:
            self.chunks, self.switches = [], 0
        return step

    def _position(self, elapsed_s: float) -> float:
        """Return the number of steps done after `elapsed_s` seconds, such as 2.5 in the middle of the third step."""
        if self.first_s <= 0:
            return float(self.steps)
        if self.slope_s <= 0 or self.steps == 1:
            return elapsed_s / self.first_s
        # Root of half * n^2 + linear * n = elapsed, in the form that is accurate for small slopes.
        half = self.slope_s / 2
        linear, elapsed_s = self.first_s - half, max(elapsed_s, 0.0)
        return 2 * elapsed_s / (linear + math.sqrt(linear * linear + 4 * half * elapsed_s))
