"""Reports about an engine, for notebooks and the command line."""

from dataclasses import dataclass
from enum import StrEnum
from html import escape

from rich.console import Console
from rich.table import Table

from sharding.ledger import format_bytes
from sharding.owners import Owner
from sharding.picture import PICTURE_WIDTH, frame, legend, number_step, rectangle
from sharding.placement import Placement

# Uses of the bytes of a layer, in the order of its column from top to bottom.
_LAYER_PARTS: tuple[str, ...] = (
    "weights",
    "kv cache in use",
    "kv cache kept",
    "kv cache free",
    "sampling",
    "padding",
)
# Color and opacity of each part. The colors are visible on light and dark pages and to color-blind readers.
_COLORS = {
    "weights": ("#5b8fd9", 1.0),
    "kv cache in use": ("#e8890c", 1.0),
    "kv cache kept": ("#e8890c", 0.6),
    "kv cache free": ("#e8890c", 0.25),
    "sampling": ("#3a9d6e", 1.0),
    "padding": ("#8c8c8c", 1.0),
    "temporaries (reserved)": ("#b07cc6", 1.0),
    "unused": ("#8c8c8c", 0.15),
}


@dataclass(frozen=True)
class InstanceStatus:
    """State of an instance (serving replica) when `LLM.instances` was read."""

    id: int
    devices: tuple[int, ...]
    tensor_parallel_size: int
    running: int
    waiting: int
    """Requests in the queue, which all instances share."""
    kv_used_pages: int
    kv_total_pages: int
    num_cached_pages: int = 0
    """Pages of cached prefixes. These pages are evicted if running requests need pages."""
    paused: int = 0
    """Number of paused requests on these devices. The requests resume after a transformation to `paused_degree`."""
    paused_degree: int = 0
    """Degree at which the paused requests ran. 0: no requests are paused."""
    placement: Placement | None = None
    """Devices that compute each layer, for each microbatch."""
    phase: str = "serving"
    """State: `serving`, `draining` (waiting for steps in flight) or `changing` (its layers are switching)."""
    expert_load_imbalance: float | None = None
    """Imbalance between the loads of the ranks (`expert_loads.load_imbalance`). None: the model has no experts."""


class TransformState(StrEnum):
    """State of a change: a transformation (merge or split of instances) or a change of placement.

    `TRANSITIONS` lists the states that may follow each state.
    """

    REQUESTED = "requested"
    AWAITING_REQUESTS = "awaiting requests"
    """Running requests must end before the change starts (`running="wait"`)."""
    AWAITING_PROGRAMS = "awaiting programs"
    """Missing programs are compiled while requests run."""
    DRAINING = "draining"
    """The steps in flight must end before the first layer switches."""
    SWITCHING = "switching"
    """Layers switch between steps."""
    SETTLING = "settling"
    """All layers have switched. Work is still in flight: the last step of a merge, copies, or restored weights."""
    DONE = "done"
    ABORTED = "aborted"
    """The change was refused, or failed before the first layer switched. Nothing has changed."""
    RECOVERED = "recovered"
    """The change failed after the first layer had switched. No request is lost.

    In a merge or split, the failed group serves at the higher degree with an empty cache, and its requests are computed
    again. If its restored weights were lost, the group serves at the lower degree. Groups that had already changed stay
    so. In a change of a placement, layers that have switched stay at their new homes.
    """


_WAITING = {TransformState.AWAITING_REQUESTS, TransformState.AWAITING_PROGRAMS, TransformState.DRAINING}
_ENDS = {TransformState.DONE, TransformState.ABORTED, TransformState.RECOVERED}
# A transformation of many devices switches some groups first and waits again before it switches others.
TRANSITIONS: dict[TransformState, set[TransformState]] = {
    TransformState.REQUESTED: {*_WAITING, TransformState.SWITCHING, *_ENDS},
    **{state: {*_WAITING, TransformState.SWITCHING, *_ENDS} for state in _WAITING},
    TransformState.SWITCHING: {TransformState.SETTLING, *_WAITING, *_ENDS},
    TransformState.SETTLING: {TransformState.SWITCHING, *_WAITING, *_ENDS},
    **{state: set() for state in _ENDS},
}


@dataclass(frozen=True)
class TransformStatus:
    """Progress of a transformation (merge or split of instances) that has not ended.

    Attributes:
        tensor_parallel_size: requested tensor-parallel degree.
        devices: devices of the instances that change.
        state: one of `TransformState`.
        programs_left: number of missing programs that the transformation waits for.
        estimated_s: expected seconds to compile the missing programs. None: unknown.
        layers_switched: number of layers that have switched to the new degree, summed over the groups of devices that
            are changing.
        num_layers: number of layers, summed over the groups of devices that are changing.
    """

    tensor_parallel_size: int
    devices: tuple[int, ...]
    state: str
    programs_left: int
    estimated_s: float | None
    layers_switched: int = 0
    num_layers: int = 0

    def __str__(self) -> str:
        left = f": {self.programs_left} left" if self.programs_left else ""
        about = "" if self.estimated_s is None else f", about {self.estimated_s:.0f} s"
        switched = f": {self.layers_switched} of {self.num_layers} layers" if self.num_layers else ""
        return f"TP{self.tensor_parallel_size}, {self.state}{left}{about}{switched}"


@dataclass(frozen=True)
class PlacementStatus:
    """Progress of a change of placement (layers that are copied, moved or removed) that has not ended.

    Attributes:
        kind: `replicate`, `evict`, `migrate`, `scale_out` or `scale_in`.
        instance: id of the instance.
        device: index of the device that gets or loses layers.
        layers: index of the first layer, and index after the last layer. (0, 0): all layers.
        state: one of `TransformState`.
        layers_switched: number of layers that have switched to their new devices.
    """

    kind: str
    instance: int
    device: int
    layers: tuple[int, int]
    state: str
    layers_switched: int


@dataclass(frozen=True)
class ExecutableInfo:
    """Description of a compiled program."""

    kind: str
    """Kind of work: `step`, `sample`, `exchange`, `restore` and others."""
    name: str
    """Description of the program's work."""
    devices: tuple[int, ...]
    compile_s: float
    """Seconds to trace and compile the program, or to load it."""
    cached: bool
    """Whether the program was loaded from a cache, or relocated (`relocated`). False: XLA compiled the program."""
    relocated: bool
    """Whether the program was compiled for other devices and then loaded for `devices`."""
    code_bytes: int
    """Bytes of machine code. 0: XLA does not report the size, as on CPU."""
    temp_bytes: int
    """Bytes of temporaries on each device while the program runs."""
    argument_bytes: int
    """Bytes of arguments on each device."""
    output_bytes: int
    """Bytes of results on each device."""
    aliased_bytes: int
    """Bytes of donated arguments on each device, which the program updates in place."""

    @property
    def tensor_parallel_size(self) -> int:
        """Number of devices that run the program together."""
        return len(self.devices)


@dataclass(frozen=True)
class MemoryEntry:
    """Bytes of one owner (such as FFN weights) on one device. `layer` is None for buffers that belong to no layer."""

    device: int
    layer: int | None
    owner: str
    num_bytes: int
    padding_bytes: int = 0
    """Bytes of padding, contained in `num_bytes`. Padding (zeros and copies of heads) makes sizes divisible."""


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """Bytes of each owner (`sharding.owners.Owner`) on each device. Prints as a table. Notebooks show a picture."""

    budget_bytes: int
    entries: tuple[MemoryEntry, ...]
    kv_used_bytes: tuple[int, ...]
    """Bytes of the KV cache in pages of running requests, by device."""
    reserved_bytes: tuple[int, ...]
    """Bytes reserved for temporaries of programs and transformations, by device."""
    padding: dict[str, float]
    """Ratio of stored elements to elements of the model, by kind of parameter and for `kv cache`. 1.0: no padding."""
    kv_kept_bytes: tuple[int, ...] = ()
    """Bytes of the KV cache in pages of cached prefixes, by device. These pages are evicted if requests need pages."""

    def device_bytes(self, device: int) -> int:
        """Return the bytes of live buffers on a device."""
        return sum(entry.num_bytes for entry in self.entries if entry.device == device)

    def by_owner(self, device: int) -> dict[str, int]:
        """Return the bytes of each owner (such as KV cache) on a device, summed over all layers."""
        totals: dict[str, int] = {}
        for entry in self.entries:
            if entry.device == device:
                totals[entry.owner] = totals.get(entry.owner, 0) + entry.num_bytes
        return totals

    def parts(self, device: int) -> dict[int | None, dict[str, int]]:
        """Return the bytes on a device as `{layer: {use: bytes}}`. Layer None has the buffers that belong to no layer.

        The uses are `weights`, `kv cache in use`, `kv cache kept` (pages of cached prefixes), `kv cache free`,
        `sampling` and `padding`. Padding in weights and KV cache counts as `padding` only. Hidden states are `weights`.
        """
        cache_bytes = self.by_owner(device).get(Owner.KV_CACHE, 0)
        layers: dict[int | None, dict[str, int]] = {}
        for entry in self.entries:
            if entry.device != device:
                continue
            parts = layers.setdefault(entry.layer, dict.fromkeys(_LAYER_PARTS, 0))
            parts["padding"] += entry.padding_bytes
            if entry.owner != Owner.KV_CACHE:
                parts["sampling" if entry.owner == Owner.SAMPLING else "weights"] += (
                    entry.num_bytes - entry.padding_bytes
                )
            elif entry.num_bytes:
                free, free_padding = entry.num_bytes, entry.padding_bytes
                for part, of_device in (("kv cache in use", self.kv_used_bytes), ("kv cache kept", self.kv_kept_bytes)):
                    size = of_device[device] * entry.num_bytes // cache_bytes if of_device else 0
                    padding = entry.padding_bytes * size // entry.num_bytes
                    parts[part] += size - padding
                    free, free_padding = free - size, free_padding - padding
                parts["kv cache free"] += free - free_padding
        return layers

    def unused_bytes(self, device: int) -> int:
        """Return the bytes of a device's budget that are neither used nor reserved. The result can be negative."""
        return self.budget_bytes - self.reserved_bytes[device] - self.device_bytes(device)

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({entry.device for entry in self.entries}))

    def rows(self) -> list[list[str]]:
        """Return the header and the rows of the table, with one column for each device.

        Each owner (such as KV cache) has a row. Further rows have the bytes of the KV cache in use, cached prefixes,
        padding, reserved memory, unused memory and the budget.
        """
        devices = self.devices
        totals = {device: self.by_owner(device) for device in devices}
        owners = list(dict.fromkeys(owner for device in devices for owner in totals[device]))
        rows = [["owner", *(f"device {device}" for device in devices)]]
        rows += [[owner, *(format_bytes(totals[device].get(owner, 0)) for device in devices)] for owner in owners]
        rows.append(["  of it in use (kv)", *(format_bytes(self.kv_used_bytes[device]) for device in devices)])
        if self.kv_kept_bytes:
            rows.append(["  of it kept (prefixes)", *(format_bytes(self.kv_kept_bytes[device]) for device in devices)])
        padding = [sum(e.padding_bytes for e in self.entries if e.device == device) for device in devices]
        rows.append(["  of all padding", *(format_bytes(size) for size in padding)])
        rows.append(["temporaries (reserved)", *(format_bytes(self.reserved_bytes[device]) for device in devices)])
        rows.append(["unused", *(format_bytes(self.unused_bytes(device)) for device in devices)])
        rows.append(["budget", *(format_bytes(self.budget_bytes) for _ in devices)])
        return rows

    def table(self) -> Table:
        """Return the report as a rich table."""
        header, *rows = self.rows()
        padded = ", ".join(f"{kind} {ratio:.2f}x" for kind, ratio in self.padding.items() if ratio > 1.0005)
        table = Table(title="device memory", caption=f"padding: {padded or 'none'}")
        for index, name in enumerate(header):
            table.add_column(name, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        return table

    def __repr__(self) -> str:
        # The width fits all figures. The result is text in notebooks too.
        console = Console(width=max(100, 30 + 14 * len(self.devices)), color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()

    def _repr_html_(self) -> str:
        header, *rows = self.rows()
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        return f"{_picture(self)}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class _Column:
    """Column in the picture of a device's memory.

    A column shows a layer, the buffers that belong to no layer, the reserved bytes, or the unused bytes.
    """

    layer: int | None
    parts: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


def _picture(report: MemoryReport) -> str:
    """Return the memory report as HTML: a legend, and an SVG with a row for each device and a column for each layer.

    The widths are to scale. The HTML needs no script, style sheet or other file, so every notebook viewer shows it.
    """
    rows = {device: _columns(report, device) for device in report.devices}
    longest = max((sum(column.num_bytes for column in columns) for columns in rows.values()), default=1)
    scale = PICTURE_WIDTH / longest
    height = 96 if len(rows) <= 4 else 56
    pitch = height + 48
    drawn = "".join(
        f'<g transform="translate(0 {index * pitch})">{_row(report, device, columns, scale, height)}</g>'
        for index, (device, columns) in enumerate(rows.items())
    )
    present = {part for columns in rows.values() for column in columns for part, size in column.parts.items() if size}
    swatches = legend((part, *color) for part, color in _COLORS.items() if part in present)
    caption = (
        f"{swatches}<br>A row is a device with its whole budget: a column for each layer, then the buffers outside the "
        "layers. Areas are to scale; point at one for its bytes."
    )
    return frame("device memory", caption, drawn, pitch * len(rows))


def _columns(report: MemoryReport, device: int) -> list[_Column]:
    """Return the columns of a device. Their bytes add up to the budget, or to more if the budget is exceeded."""
    parts = report.parts(device)
    layers = sorted(layer for layer in parts if layer is not None)
    columns = [_Column(layer, parts[layer]) for layer in layers]
    columns.append(_Column(None, parts.get(None, {})))
    columns.append(_Column(None, {"temporaries (reserved)": report.reserved_bytes[device]}))
    # Programs may need more than was reserved: show no negative width.
    columns.append(_Column(None, {"unused": max(report.unused_bytes(device), 0)}))
    return columns


def _row(report: MemoryReport, device: int, columns: list[_Column], scale: float, height: int) -> str:
    """Return the SVG row of a device: its bytes, its columns and the numbers of the layers."""
    held = f"device {device}: {format_bytes(report.device_bytes(device))} of {format_bytes(report.budget_bytes)}"
    shapes, numbers, x = [], [], 0.0
    narrowest = min((c.num_bytes for c in columns if c.layer is not None and c.num_bytes), default=1) * scale
    step = number_step(narrowest)
    for column in columns:
        width = column.num_bytes * scale
        name = "outside the layers" if column.layer is None else f"layer {column.layer}"
        shapes.append(_stack(f"device {device}, {name}", column.parts, x, width, height))
        if column.layer is not None and column.layer % step == 0:
            numbers.append(f'<text x="{x + width / 2:.2f}" y="{height + 31}">{column.layer}</text>')
        x += width
    return (
        f'<text y="12">{escape(held)}</text>'
        f'<g stroke="currentColor" stroke-width=".5" stroke-opacity=".3">{"".join(shapes)}</g>'
        f'<g text-anchor="middle">{"".join(numbers)}</g>'
    )


def _stack(title: str, parts: dict[str, int], x: float, width: float, height: int) -> str:
    """Return the SVG of a column: its parts on top of each other, and a tooltip with their bytes."""
    present = {part: size for part, size in parts.items() if size}
    if not present:
        return ""
    lines = "\n".join([title, *(f"{part}: {format_bytes(size)}" for part, size in present.items())])
    y, rectangles = 18.0, []
    for part, size in present.items():
        color, opacity = _COLORS[part]
        part_height = height * size / sum(present.values())
        rectangles.append(rectangle(x, y, width, part_height, color, opacity))
        y += part_height
    return f"<g><title>{escape(lines)}</title>{''.join(rectangles)}</g>"


@dataclass(frozen=True)
class DegreePrograms:
    """Progress of the background compilation for one tensor-parallel degree.

    Attributes:
        degree: tensor-parallel degree.
        num_programs: number of programs of this degree. Programs of transformations between two degrees belong to the
            degree that is compiled later.
        num_ready: number of programs that are compiled.
    """

    degree: int
    num_programs: int
    num_ready: int

    @property
    def ready(self) -> bool:
        """Whether all programs of this degree are compiled."""
        return self.num_ready == self.num_programs
