"""Classes of requests by their priority, for limits and figures of each."""

from enum import IntEnum


class PriorityClass(IntEnum):
    """The more urgent first. Requests count against the limits of their own class and of those behind it, so that what
    waits of a class keeps out no request of a more urgent one."""

    URGENT = 0
    """`priority` below 0, where the server allows it (`min_priority`)."""
    STANDARD = 1
    """`priority` 0, which is the default."""
    BEST_EFFORT = 2
    """`priority` above 0."""

    @property
    def label(self) -> str:
        """Name of the class in texts and metrics."""
        return self.name.lower()


def class_of(priority: int) -> PriorityClass:
    """The class of a request with a `SamplingParams.priority`."""
    if priority < 0:
        return PriorityClass.URGENT
    return PriorityClass.BEST_EFFORT if priority else PriorityClass.STANDARD
