"""What an instance knows of a change of its layers' placement, and tells of its pages."""

from typing import NamedTuple, Protocol


class Changing(Protocol):
    """What changes the placement of an instance's layers, from one step to the next."""

    @property
    def overlaps(self) -> bool:
        """Whether they may change within a step."""
        ...


class PageCounts(NamedTuple):
    """Pages of an instance.

    Attributes:
        available: that are free, or hold prefixes that no sequence uses.
        cached: of these, the latter.
    """

    total: int
    available: int
    cached: int
