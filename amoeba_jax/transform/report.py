"""Reports of transformations and of changes of a placement."""

from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table

from sharding.ledger import format_bytes


class TransformVariant(StrEnum):
    """Way in which layers switch during a transformation."""

    IN_PLACE_OVERLAPPED = "in_place_overlapped"
    """Layers switch between steps, and the pages of a layer move inside the memory that the layer already has.

    The host launches the next step without waiting for a switch.
    """
    IN_PLACE = "in_place"
    """As `IN_PLACE_OVERLAPPED`, but the host waits for each switch, so that the times in `LayerSwitch` are complete."""


@dataclass(frozen=True)
class LayerSwitch:
    """Report on the switch of one layer to the new layout.

    All times are measured on the host. With the variant `in_place`, the times include the wait for the devices. With
    the variant `in_place_overlapped`, the times include only the launch of the work.

    Attributes:
        layer: index of the layer.
        plan_s: number of seconds to plan the page moves. About 0 if an earlier plan was used again.
        kv_s: number of seconds to move pages.
        weights_s: number of seconds to turn weights into KV extents (merge), or KV extents into weights (split).
        phases: number of phases in which the pages moved. A phase is an exchange between ranks.
        moved_bytes: number of bytes of pages that moved, summed over the ranks.
    """

    layer: int
    plan_s: float
    kv_s: float
    weights_s: float
    phases: int
    moved_bytes: int


@dataclass(frozen=True)
class GroupTransform:
    """Report on one group of devices that changed from one degree to another.

    Attributes:
        devices: indices of the devices of the group.
        from_degree: degree before the change. If only the attention changed, degree of the attention.
        to_degree: degree after the change. If only the attention changed, degree of the attention.
        seconds: duration of the change in seconds, including the steps that ran during the change.
        layers: reports on the switches of the layers, in the order in which the layers switched.
        steps: number of steps that ran during the change.
        tokens: number of tokens that were generated during the change.
        staging_bytes: maximum bytes of temporary memory on a device for a program that moves pages or restores weights.
        restored_bytes: number of bytes of restored weights, summed over all layers and ranks.
        recomputed: number of preemptions during the change. A preempted sequence loses its pages and is computed again.
        paused: number of sequences that this change paused.
        resumed: number of sequences that this change resumed after a pause.
        prefix_pages_kept: number of pages that were cached before the change and were still cached after the change.
        prefix_pages_dropped: number of pages that were cached before the change and were not cached after the change.
        step_s: median duration in seconds of the latest 16 decode steps of an instance before the change. If several
            instances changed, the largest of their medians. None if no instance had run a decode step.
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
        """Fraction of `seconds` that the change cost, from 0 to 1. The rest is the usual time of the steps.

        This is `1 - steps * step_s / seconds`, or 0 if this number is negative. For example, 10 steps of 0.1 s that
        took 4 s give 0.75. None if no decode step ran before the change, or if no step ran during the change.
        """
        if not self.steps or self.step_s is None:
            return None
        return max(1 - self.steps * self.step_s / self.seconds, 0.0)


@dataclass(frozen=True)
class PlacementReport:
    """Result of `LLM.replicate`, `evict`, `migrate`, `scale_out` and `scale_in`.

    Attributes:
        kind: name of the method.
        instance: id of the instance that changed, or that took over the sequences in a `scale_in`.
        device: index of the device that got or lost modules (attention or FFNs of layers).
        layers: range of the changed layers, as `(first, stop)`. The last changed layer has the index `stop - 1`.
        seconds: duration of the change in seconds, until all copies have arrived.
        copied_bytes: number of bytes of weights that were copied from device to device.
        shared_bytes: number of bytes of weights that were not copied, because the device already had these weights.
        kv_moved_bytes: number of bytes of KV cache that were copied from device to device.
        device_bytes_delta: bytes of live buffers after the change minus bytes before the change, for each device.
        steps: number of steps that the instance launched during the change.
        recomputed: number of times that a sequence lost its pages during the change and was computed again.
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
        seconds: duration of the call in seconds. The compilation of missing programs is included.
        prepare_s: number of seconds, as a part of `seconds`, in which the engine compiled missing programs and launched
            no steps. Compilation in the background is not included.
        groups: reports on the groups of devices, in the order in which the groups completed their change. Empty if all
            instances already had the requested degree.
        awaited_programs: number of programs for which the call had to wait.
        waited_s: number of seconds, as a part of `seconds`, in which the call waited for programs. Requests ran as
            before in this time.
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
        """Number of bytes of pages that moved, summed over the layers and ranks of all groups."""
        return sum(layer.moved_bytes for group in self.groups for layer in group.layers)

    @property
    def extra_bytes(self) -> int:
        """Maximum number of bytes of temporary memory on a device (`GroupTransform.staging_bytes`), over all groups."""
        return max((group.staging_bytes for group in self.groups), default=0)

    @property
    def steps(self) -> int:
        """Number of steps that ran during the change, summed over the groups."""
        return sum(group.steps for group in self.groups)

    @property
    def tokens(self) -> int:
        """Number of tokens that were generated during the change, summed over the groups."""
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
