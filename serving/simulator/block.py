"""Equal steps in a row, as one event."""

import math

from serving.simulator.run import Run


class Block:
    """Steps of one composition. Each decode step takes `slope_s` longer than the one before, as contexts grow.

    Attributes:
        start_s: when the first one starts.
        steps: how many there are.
        first_s: seconds of the first.
        plain_s: seconds of a step of the same decodes without prompts and without a transformation.
        chunks: prompts that the only step computes, with the tokens taken of each.
        switches: layers that a transformation switches before the only step.
        interference_s, switch_s: of the step, what prompts and what the transformation added for those that decode.
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
        """Seconds of the first `steps` steps."""
        return steps * self.first_s + self.slope_s * steps * (steps - 1) / 2

    @property
    def end_s(self) -> float:
        """When the last step ends."""
        return self.start_s + self.time_s(self.steps)

    def done(self, now_s: float) -> int:
        """Steps that have ended."""
        whole = int(self._position(now_s - self.start_s) + 1e-9)
        return min(max(whole, 0), self.steps)

    def cut(self, now_s: float) -> bool:
        """End the block with the step that runs now: something waits for it. Returns whether that changed its end."""
        elapsed_s = now_s - self.start_s
        begun = 0 if elapsed_s <= 0 else max(math.ceil(self._position(elapsed_s) - 1e-9), 1)
        if begun >= self.steps:
            return False
        self.steps = begun
        return True

    def rest(self, now_s: float) -> "Block | None":
        """Cut the block, and return the step that runs now, as a block of its own; None if all have ended. The caller
        takes that step from this one."""
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
        """Steps, and the share of the one that runs, after that many seconds."""
        if self.first_s <= 0:
            return float(self.steps)
        if self.slope_s <= 0 or self.steps == 1:
            return elapsed_s / self.first_s
        # The root of half * n^2 + linear * n = elapsed, in the form that holds for small slopes too.
        half = self.slope_s / 2
        linear, elapsed_s = self.first_s - half, max(elapsed_s, 0.0)
        return 2 * elapsed_s / (linear + math.sqrt(linear * linear + 4 * half * elapsed_s))
