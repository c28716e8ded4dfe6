"""What an instance knows of a change of its layers' placement, and tells of its pages."""

from typing import NamedTuple, Protocol


class ChangePace(Protocol):
    """How fast layers change their home."""

    behind_step: int
    """Bytes of the switches that the next step is launched behind."""

    def step_taken(self, seconds: float, num_bytes: int) -> None:
        """Take note of a decode step that was launched behind switches of that many bytes."""
        ...


class Changing(Protocol):
    """What changes the placement of an instance's layers, from one step to the next."""

    @property
    def pace(self) -> ChangePace:
        """How fast they change."""
        ...

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
