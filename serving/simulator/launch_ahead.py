"""When an instance launches a step: our engine does so before the one before has ended."""

from typing import NamedTuple


class LaunchAhead(NamedTuple):
    """An instance launches its next step this long before the present one ends, or when that begins if it is short. A
    request which comes later waits for one step more.

    Attributes:
        lead_s: seconds before the end of the present step.
        short_step_s: a step that takes less is followed at once.
    """

    lead_s: float
    short_step_s: float = 0.0

    def launched_s(self, began_s: float, ended_s: float) -> float:
        """When the step behind one that began and ended then was launched."""
        if ended_s - began_s < self.short_step_s:
            return began_s
        return max(began_s, ended_s - self.lead_s)
