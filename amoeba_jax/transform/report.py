"""Report of a transformation."""

from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table

from sharding.ledger import format_bytes


class TransformVariant(StrEnum):
    """Way in which instances change their tensor-parallel degree."""

    IN_PLACE_OVERLAPPED = "in_place_overlapped"
    """Layers switch between steps, in the memory that they have.

    The host launches steps without waiting for a switch.
    """
    IN_PLACE = "in_place"
    """As `IN_PLACE_OVERLAPPED`, but the host waits for each switch, so that the parts of a switch can be measured."""


@dataclass(frozen=True)
class LayerSwitch:
    """Switch of one layer to the new layout.

    All times are measured on the host. They are times to launch the work. With the variant `in_place`, they are times
    to run it.

    Attributes:
        plan_s: seconds to plan the moves of pages; 0 if the plan of the layer before is still valid.
        kv_s: seconds to move pages.
        weights_s: seconds to turn weights into KV extents, or extents into weights.
        phases: number of exchanges that moved the pages.
        moved_bytes: bytes of pages that moved, on all ranks together.
    """

    layer: int
    plan_s: float
    kv_s: float
    weights_s: float
    phases: int
    moved_bytes: int


@dataclass(frozen=True)
class GroupTransform:
    """Change of one group of devices from one degree to another.

    Attributes:
        seconds: time from the start until the switch of the last layer has run, including the steps in between.
        layers: switches of layers, in order.
        steps: number of steps that ran during the change.
        tokens: number of tokens that these steps generated.
        staging_bytes: maximum temporary bytes on a device: temporaries of the page exchange.
        restored_bytes: bytes of restored weights that came from other ranks, on all ranks together.
        recomputed: number of times that a sequence lost its pages because no page was free.
        paused: number of sequences that this change paused.
        resumed: number of paused sequences that this change resumed.
        prefix_pages_kept: number of cached pages that are still cached after the change.
        prefix_pages_dropped: number of cached pages that were dropped because no page was free for them.
        step_s: seconds of a decode step before the change: the median of the latest 16 steps of the slowest instance.
            None if no step had run.
    """

    devices: tuple[int, ...]
    from_degree: int
    to_degree: int
    seconds: float
    layers: tuple[LayerSwitch, ...] = ()
    steps: int = 0
    tokens: int = 0
    staging_bytes: int = 0
    restored_bytes: int = 0
    recomputed: int = 0
    step_s: float | None = None
    paused: int = 0
    resumed: int = 0
    prefix_pages_kept: int = 0
    prefix_pages_dropped: int = 0

    @property
    def step_overhead(self) -> float | None:
        """Fraction of `seconds` that the change added, from 0 to 1.

        The rest of `seconds` is the time that the steps would have taken without the change: `steps * step_s`. None if
        no step ran before or during the change.
        """
        if not self.steps or self.step_s is None:
            return None
        return max(1 - self.steps * self.step_s / self.seconds, 0.0)


@dataclass(frozen=True)
class PlacementReport:
    """Result of `LLM.replicate`, `evict`, `migrate`, `scale_out` and `scale_in`.

    Attributes:
        kind: name of the method.
        instance: id of the instance.
        device: device that got or lost modules.
        layers: first layer, and the layer after the last.
        seconds: time from the start of the change until all copies have arrived.
        copied_bytes: bytes of weights copied from device to device.
        shared_bytes: bytes of weights that the new home already held, because it serves another instance.
        kv_moved_bytes: bytes of KV cache copied from device to device.
        device_bytes_delta: change of the live bytes of each device.
        steps: number of steps that the instance launched during the change.
        recomputed: number of times that a sequence lost its pages during the change.
    """

    kind: str
    instance: int
    device: int
    layers: tuple[int, int]
    seconds: float
    copied_bytes: int
    shared_bytes: int
    kv_moved_bytes: int
    device_bytes_delta: tuple[int, ...]
    steps: int
    recomputed: int


@dataclass(frozen=True)
class TransformReport:
    """Result of `LLM.transform`. Prints as a table.

    Attributes:
        tensor_parallel_size: requested degree.
        seconds: time from the call to the end, including compilation of missing programs.
        prepare_s: part of `seconds` in which the engine compiled programs itself.
        groups: changes of groups, in the order of completion. Empty if all instances had the degree already.
        awaited_programs: number of programs that were missing at the call, or that became necessary later.
        waited_s: part of `seconds` in which the call waited for these programs while requests ran as before.
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
        """Bytes of pages that moved, on all ranks together."""
        return sum(layer.moved_bytes for group in self.groups for layer in group.layers)

    @property
    def extra_bytes(self) -> int:
        """Maximum temporary bytes on a device."""
        return max((group.staging_bytes for group in self.groups), default=0)

    @property
    def steps(self) -> int:
        """Number of steps that ran on the changing devices during the change."""
        return sum(group.steps for group in self.groups)

    @property
    def tokens(self) -> int:
        """Number of tokens that the steps during the change generated."""
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
