"""Live picture of `amoeba demo`: devices, instances and requests.

If stdout is no terminal, only lines with events are printed.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from amoeba_jax import LLM
from amoeba_jax.views import InstanceStatus, MemoryReport

INTERVAL_S = 0.1
MAX_WIDTH = 120
MEMORY_PARTS = (
    ("weights", "blue", "▓"),
    ("kv cache in use", "dark_orange", "█"),
    ("kv cache free", "grey50", "·"),
)


class Progress(Protocol):
    """Request whose progress the live view of the demo shows."""

    label: str

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens so far."""
        ...

    @property
    def max_tokens(self) -> int:
        """Number of tokens that the request will generate."""
        ...


class DemoView:
    """Live picture and event lines of a demo run, shown inside a `with` block.

    Attributes:
        requests: requests to show. The demo appends each request that it sends.
    """

    def __init__(self, console: Console, llm: LLM) -> None:
        self.requests: list[Progress] = []
        self._console, self._llm = console, llm
        self._start = time.perf_counter()
        self._stop = threading.Event()
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self._thread = threading.Thread(target=self._follow, name="amoeba-demo-view", daemon=True)

    def __enter__(self) -> "DemoView":
        self._start = time.perf_counter()
        if self._live is not None:
            self._live.start()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._live is not None:
            self._thread.join()
            self._live.stop()

    def event(self, text: str) -> None:
        """Print a line with the seconds since the start. The line stays on the screen, above the picture."""
        self._console.print(f"{time.perf_counter() - self._start:5.1f} s  {text}", markup=False)

    def _follow(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            page_size, width = self._llm.config.page_size, self._console.width
            picture = draw(self._llm.instances, self._llm.memory(), self.requests, page_size, width)
            assert self._live is not None
            self._live.update(picture, refresh=True)


def draw(
    instances: Sequence[InstanceStatus],
    memory: MemoryReport,
    requests: Sequence[Progress],
    page_size: int,
    width: int,
) -> RenderableType:
    """Return a picture with a box for each instance and a line for each request.

    The width of a box is proportional to the number of devices of the instance.

    Args:
        memory: memory report of all devices.
        page_size: number of tokens in a page of the KV cache.
        width: maximum width in characters.
    """
    num_devices = sum(len(instance.devices) for instance in instances)
    cell = min(width, MAX_WIDTH) // num_devices
    boxes = Table.grid()
    for instance in instances:
        boxes.add_column(width=cell * len(instance.devices))
    boxes.add_row(*(_instance_box(instance, memory, page_size, cell) for instance in instances))
    lines = Table.grid(padding=(0, 2))
    bar_width = min(width, MAX_WIDTH) // 4
    lines.add_column(no_wrap=True, overflow="ellipsis", width=min(width, MAX_WIDTH) - bar_width - 22)
    lines.add_column(no_wrap=True)
    lines.add_column(no_wrap=True, justify="right")
    for request in list(requests):
        done, total = request.num_tokens, request.max_tokens
        filled = bar_width * done // total
        bar = Text("━" * filled, style="green") + Text("─" * (bar_width - filled), style="grey50")
        status = f"{done}/{total} tokens" if done else "no token yet"
        lines.add_row(Text(request.label), bar, status)
    return Group("", boxes, memory_legend(), "", lines)


def _instance_box(instance: InstanceStatus, memory: MemoryReport, page_size: int, cell: int) -> Panel:
    width = cell - 4
    devices = Table.grid()
    for _ in instance.devices:
        devices.add_column(width=cell if len(instance.devices) > 1 else width)
    devices.add_row(*(f"device {device}" for device in instance.devices))
    devices.add_row(*(memory_bar(memory, device, width) for device in instance.devices))
    merged = len(instance.devices) > 1
    used, total = (pages * page_size for pages in (instance.kv_used_pages, instance.kv_total_pages))
    return Panel(
        Group(
            devices,
            f"{instance.running} request{'' if instance.running == 1 else 's'}",
            f"{used:,}/{total:,} tokens",
        ),
        title=f"instance TP{instance.tensor_parallel_size}",
        title_align="left",
        border_style="green" if merged else "blue",
        box=box.HEAVY if merged else box.ROUNDED,
    )


def memory_bar(memory: MemoryReport, device: int, width: int) -> Text:
    """Return a bar that shows how much memory of a device the layers use for weights and for KV cache.

    The bar has one section for each part in `MEMORY_PARTS`. The sections are to scale.
    """
    sizes = layer_bytes(memory, device)
    total = max(sum(sizes.values()), 1)
    # A short request uses about 1% of a device, and is visible too.
    used = max(round(width * sizes["kv cache in use"] / total), min(sizes["kv cache in use"], 1))
    weights = min(round(width * sizes["weights"] / total), width - used)
    bar = Text()
    for (_, color, letter), length in zip(MEMORY_PARTS, (weights, used, width - used - weights), strict=True):
        bar.append(letter * length, style=color)
    return bar


def memory_legend() -> Text:
    """Return a line that explains the letters in a memory bar."""
    text = Text()
    for part, color, letter in MEMORY_PARTS:
        text.append(f"{letter} {part.replace('kv', 'KV')}   ", style=color)
    return text


def layer_bytes(memory: MemoryReport, device: int) -> dict[str, int]:
    """Return the bytes of all layers on a device, by part (`MEMORY_PARTS`). Padding counts as weights."""
    sizes = dict.fromkeys((part for part, _, _ in MEMORY_PARTS), 0)
    for layer, parts in memory.parts(device).items():
        if layer is not None:
            for part, size in parts.items():
                sizes[part if part in sizes else "weights"] += size
    return sizes


@contextmanager
def sampled(llm: LLM, interval_s: float = 0.02) -> Iterator[list[MemoryReport]]:
    """Yield a list that gets a memory report of an engine every `interval_s` seconds until the `with` block ends."""
    reports: list[MemoryReport] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(interval_s):
            reports.append(llm.memory())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield reports
    finally:
        stop.set()
        thread.join()
