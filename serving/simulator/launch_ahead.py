"""Launch times of steps: an engine launches a step before the previous step ends."""

from typing import NamedTuple


class LaunchAhead(NamedTuple):
    """Launch rule of the next step. A request that arrives after the launch waits for one more step.

    Attributes:
        lead_s: seconds from the launch to the end of the running step.
        short_step_s: duration below which a step is followed by a launch at its start.
    """

    lead_s: float
    short_step_s: float = 0.0

    def launched_s(self, began_s: float, ended_s: float) -> float:
        """Return the launch time of the step that follows a step with this start and end."""
        if ended_s - began_s < self.short_step_s:
            return began_s
        return max(began_s, ended_s - self.lead_s)
