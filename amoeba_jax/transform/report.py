"""What a transformation is asked to do, and what it did."""

import time
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table

from sharding.ledger import format_bytes


class TransformVariant(StrEnum):
    """How instances change their tensor-parallel degree."""

    IN_PLACE_OVERLAPPED = "in_place_overlapped"
    """Layer by layer between steps, in the memory there is; steps are launched behind it without waiting."""
    IN_PLACE = "in_place"
    """The same, but each layer's switch is waited for, so that its parts can be timed."""


@dataclass(frozen=True)
class LayerSwitch:
    """One layer's passage to the new layout. Seconds are the host's: of launching, or of running if waited for.

    Attributes:
        plan_s: planning which pages go where; nothing where the plan of the layer before still holds.
        kv_s: moving pages.
        weights_s: handing extents over to the KV cache, or making them weights again.
        phases: exchanges that moved the pages.
        moved_bytes: of pages that changed their place, on all ranks together.
    """

    layer: int
    plan_s: float
    kv_s: float
    weights_s: float
    phases: int
    moved_bytes: int


@dataclass(frozen=True)
class GroupTransform:
    """A group of devices that went from one degree to another.

    Attributes:
        seconds: from its start until its last layer's switch has run, steps in between included.
        layers: in the order in which they switched.
        steps: that ran while it was under way.
        tokens: that these steps computed, one of each sequence that was running when the step was launched.
        staging_bytes: the most that a device needed besides what it had. In place: temporaries of the exchange.
        restored_bytes: of weights that came back from peers, on all ranks together.
        recomputed: how often a sequence lost its pages, to be computed again, as pages ran out.
        paused: sequences that pause since.
        resumed: sequences that had paused, and go on.
        prefix_pages_kept: cached pages that can still be found.
        prefix_pages_dropped: cached pages for which there was no room.
        step_s: duration of a decode step before it, of the slowest instance: the median of the latest 16. None if
            nothing had been decoded.
    """

    devices: tuple[int, ...]
    from_degree: int
    to_degree: int
    seconds: float
    layers: tuple[LayerSwitch, ...]
    steps: int
    tokens: int
    staging_bytes: int
    restored_bytes: int
    recomputed: int = 0
    step_s: float | None = None
    paused: int = 0
    resumed: int = 0
    prefix_pages_kept: int = 0
    prefix_pages_dropped: int = 0

    @classmethod
    def without_moves(
        cls, devices: tuple[int, ...], degrees: tuple[int, int], start: float, **counts: int
    ) -> "GroupTransform":
        """Report on a group that changed its degree at once, beginning at `start` by `time.perf_counter()`."""
        counts = {"steps": 0, "tokens": 0, "staging_bytes": 0, "restored_bytes": 0} | counts
        return cls(devices, *degrees, time.perf_counter() - start, layers=(), **counts)

    @property
    def step_overhead(self) -> float | None:
        """Share of its time that it took from its steps, from 0 to 1: what is left of `seconds` without `steps` as
        long as before it. None if no step ran while it was under way, or none before it."""
        if not self.steps or self.step_s is None:
            return None
        return max(1 - self.steps * self.step_s / self.seconds, 0.0)


@dataclass(frozen=True)
class TransformReport:
    """What `LLM.transform` did. Prints as a table.

    Attributes:
        tensor_parallel_size: degree that was asked for.
        seconds: from the call to the end, compilation of missing programs included.
        prepare_s: of these, compiling.
        groups: what happened, in the order of completion; empty where all instances had the degree already.
        awaited_programs: number of programs that were missing when it was requested, or became necessary later.
        waited_s: seconds of waiting for these programs, while requests ran as before. Part of `seconds`.
    """

    variant: TransformVariant
    tensor_parallel_size: int
    seconds: float
    prepare_s: float
    groups: tuple[GroupTransform, ...]
    awaited_programs: int = 0
    waited_s: float = 0.0

    @property
    def moved_bytes(self) -> int:
        """Bytes of pages that changed their place."""
        return sum(layer.moved_bytes for group in self.groups for layer in group.layers)

    @property
    def extra_bytes(self) -> int:
        """Most bytes that any device needed besides what it had."""
        return max((group.staging_bytes for group in self.groups), default=0)

    @property
    def steps(self) -> int:
        """Steps that ran meanwhile on the devices that changed."""
        return sum(group.steps for group in self.groups)

    @property
    def tokens(self) -> int:
        """Tokens that these steps generated."""
        return sum(group.tokens for group in self.groups)

    def __str__(self) -> str:
        title = f"to TP{self.tensor_parallel_size}, {self.variant}, {self.seconds * 1e3:.0f} ms"
        if self.awaited_programs:
            title += f", of which {self.waited_s * 1e3:.0f} ms waiting for programs ({self.awaited_programs})"
        table = Table(title=title)
        for column in (
            "devices",
            "degree",
            "ms",
            "layers",
            "steps",
            "tokens",
            "pages moved",
            "restored",
            "extra",
            "recomputed",
            "paused",
            "resumed",
        ):
            table.add_column(column, justify="right")
        for group in self.groups:
            table.add_row(
                f"{group.devices[0]}-{group.devices[-1]}",
                f"{group.from_degree} to {group.to_degree}",
                f"{group.seconds * 1e3:.0f}",
                str(len(group.layers)),
                str(group.steps),
                str(group.tokens),
                format_bytes(sum(layer.moved_bytes for layer in group.layers)),
                format_bytes(group.restored_bytes),
                format_bytes(group.staging_bytes),
                str(group.recomputed),
                str(group.paused),
                str(group.resumed),
            )
        console = Console(width=120, no_color=True)
        with console.capture() as capture:
            console.print(table)
        return capture.get().rstrip()
