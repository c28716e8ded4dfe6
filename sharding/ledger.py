"""Memory ledger of a device: the bytes of each owner (such as KV cache), within a budget."""

import re
from collections import defaultdict
from dataclasses import dataclass, field

from sharding.errors import MemoryBudgetError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(size: str | int) -> int:
    """Parse a size such as `"2GiB"`, `"512 MiB"`, `"1.5GB"` or a plain number of bytes. Return bytes.

    Raises `MemoryBudgetError` if the size cannot be parsed.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS:
        raise MemoryBudgetError(f"{size!r} is not a memory size: write bytes, or a number with MiB, GiB, MB or GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(size: int) -> str:
    """Format bytes with a unit: `1536` becomes `1.5 KiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


@dataclass
class Ledger:
    """Bytes of each owner (such as KV cache) on one device. Entries and reservations together never exceed the budget.

    Attributes:
        budget_bytes: limit for the sum of all entries and reservations.
        entries: bytes of the buffers that live between steps, by (layer, owner). The layer is None for a buffer that
            belongs to no layer.
        reserved: bytes of temporary memory of running programs (activations), by name.
    """

    budget_bytes: int
    entries: dict[tuple[int | None, str], int] = field(default_factory=lambda: defaultdict(int))
    reserved: dict[str, int] = field(default_factory=dict)

    @property
    def live_bytes(self) -> int:
        """Bytes of buffers that live between steps."""
        return sum(self.entries.values())

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that neither live buffers nor reservations use."""
        return self.budget_bytes - self.live_bytes - sum(self.reserved.values())

    def add(self, what: str, num_bytes: int, layer: int | None = None) -> None:
        """Add the bytes of new buffers to the owner `what` in `layer`.

        `layer` is None for buffers that belong to no single layer. Raises `MemoryBudgetError` if fewer than `num_bytes`
        bytes are free.
        """
        if num_bytes > self.free_bytes:
            raise MemoryBudgetError(
                f"{what} needs {format_bytes(num_bytes)} but only {format_bytes(self.free_bytes)} of the "
                f"{format_bytes(self.budget_bytes)} device memory are left: raise device_memory"
            )
        self.entries[(layer, what)] += num_bytes

    def remove(self, what: str, num_bytes: int, layer: int | None = None) -> None:
        """Remove bytes of freed buffers from the owner `what` in `layer`.

        Raises `MemoryBudgetError` if the owner has fewer bytes.
        """
        held = self.entries[(layer, what)]
        if num_bytes > held:
            raise MemoryBudgetError(
                f"{format_bytes(num_bytes)} of {what} cannot be freed: only {format_bytes(held)} exist"
            )
        self.entries[(layer, what)] = held - num_bytes

    def transfer(self, what: str, to: str, num_bytes: int, layer: int | None = None) -> None:
        """Move bytes in `layer` from the owner `what` to the owner `to`.

        Raises `MemoryBudgetError` if the owner `what` has fewer bytes.
        """
        entries, owner = self.entries, (layer, what)
        held = entries[owner]
        if num_bytes > held:
            raise MemoryBudgetError(
                f"{format_bytes(num_bytes)} of {what} cannot become {to}: only {format_bytes(held)} exist"
            )
        entries[owner] = held - num_bytes
        entries[(layer, to)] += num_bytes

    def reserve(self, what: str, num_bytes: int) -> None:
        """Reserve temporary memory of programs under the name `what`.

        This replaces an earlier reservation with this name.

        Raises `MemoryBudgetError`, and changes nothing, if fewer than `num_bytes` bytes are free.
        """
        available = self.free_bytes + self.reserved.get(what, 0)
        if num_bytes > available:
            raise MemoryBudgetError(
                f"{what} need {format_bytes(num_bytes)} but only {format_bytes(available)} of the "
                f"{format_bytes(self.budget_bytes)} device memory are left: raise device_memory or lower "
                "max_num_batched_tokens"
            )
        self.reserved[what] = num_bytes
