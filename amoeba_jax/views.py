"""Read-only pictures of an engine, for notebooks and the command line."""

from dataclasses import dataclass
from html import escape

from rich.console import Console
from rich.table import Table

from sharding.ledger import format_bytes


@dataclass(frozen=True)
class InstanceView:
    """One serving replica at the moment of asking."""

    id: int
    devices: tuple[int, ...]
    tensor_parallel_size: int
    running: int
    waiting: int
    """Requests in the queue that all instances share."""
    kv_used_pages: int
    kv_total_pages: int


@dataclass(frozen=True)
class MemoryEntry:
    """Bytes of one owner on one device. `layer` is None for what belongs to no layer."""

    device: int
    layer: int | None
    owner: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """Who owns which bytes on each device. Prints as a table; draws itself in a notebook."""

    budget_bytes: int
    entries: tuple[MemoryEntry, ...]
    kv_used_bytes: tuple[int, ...]
    """Per device: the part of `kv cache` that holds pages of running requests."""
    reserved_bytes: int
    """Per device: kept free for the temporaries of running programs."""
    padding: dict[str, float]
    """Stored over model elements, by kind of parameter, and `kv cache`: 1.0 means no padding."""

    def device_bytes(self, device: int) -> int:
        """Bytes of live buffers on a device."""
        return sum(entry.num_bytes for entry in self.entries if entry.device == device)

    def by_owner(self, device: int) -> dict[str, int]:
        """Bytes of each owner on a device, over all layers."""
        totals: dict[str, int] = {}
        for entry in self.entries:
            if entry.device == device:
                totals[entry.owner] = totals.get(entry.owner, 0) + entry.num_bytes
        return totals

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({entry.device for entry in self.entries}))

    def rows(self) -> list[list[str]]:
        """Header and rows of the table: an owner a row, a device a column."""
        devices = self.devices
        totals = {device: self.by_owner(device) for device in devices}
        owners = list(totals[devices[0]]) if devices else []
        rows = [["owner", *(f"device {device}" for device in devices)]]
        rows += [[owner, *(format_bytes(totals[device].get(owner, 0)) for device in devices)] for owner in owners]
        rows.append(["  of it in use (kv)", *(format_bytes(self.kv_used_bytes[device]) for device in devices)])
        rows.append(["temporaries (reserved)", *(format_bytes(self.reserved_bytes) for _ in devices)])
        free = [self.budget_bytes - self.reserved_bytes - self.device_bytes(device) for device in devices]
        rows.append(["unused", *(format_bytes(size) for size in free)])
        rows.append(["budget", *(format_bytes(self.budget_bytes) for _ in devices)])
        return rows

    def table(self) -> Table:
        """The report as a rich table."""
        header, *rows = self.rows()
        padded = ", ".join(f"{kind} {ratio:.2f}x" for kind, ratio in self.padding.items() if ratio > 1.0005)
        table = Table(title="device memory", caption=f"padding: {padded or 'none'}")
        for index, name in enumerate(header):
            table.add_column(name, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        return table

    def __str__(self) -> str:
        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()

    def _repr_html_(self) -> str:
        header, *rows = self.rows()
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
