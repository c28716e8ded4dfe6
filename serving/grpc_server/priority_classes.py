"""Priority classes of requests. Each class has limits of its own."""

from enum import IntEnum


class PriorityClass(IntEnum):
    """Class of requests by priority. A lower value is more urgent.

    Some limits are shared by all classes. For a new request, these limits count the requests of its class and of more
    urgent classes. Less urgent requests therefore never cause a refusal.
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
    """Return the class of a request with the given `SamplingParams.priority`."""
    if priority < 0:
        return PriorityClass.URGENT
    return PriorityClass.BEST_EFFORT if priority else PriorityClass.STANDARD
