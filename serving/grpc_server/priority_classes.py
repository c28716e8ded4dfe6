"""Classes of requests by priority, with limits of their own."""

from enum import IntEnum


class PriorityClass(IntEnum):
    """A class of requests. Lower values are more urgent.

    A request counts against the limits of its own class and of less urgent classes. So a full queue of one class does
    not refuse requests of a more urgent class.
    """

    URGENT = 0
    """`priority` below 0, if the server allows it (`min_priority`)."""
    STANDARD = 1
    """`priority` 0, which is the default."""
    BEST_EFFORT = 2
    """`priority` above 0."""

    @property
    def label(self) -> str:
        """Name of the class in error messages."""
        return self.name.lower()


def class_of(priority: int) -> PriorityClass:
    """Return the class of a `SamplingParams.priority`."""
    if priority < 0:
        return PriorityClass.URGENT
    return PriorityClass.BEST_EFFORT if priority else PriorityClass.STANDARD
