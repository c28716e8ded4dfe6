"""Progress bars on stderr, in terminals and notebooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

COUNT: tuple[type[ProgressColumn], ...] = (MofNCompleteColumn,)
BYTES: tuple[type[ProgressColumn], ...] = (DownloadColumn, TransferSpeedColumn, TimeRemainingColumn)


@contextmanager
def progress_bar(
    description: str, total: int, *, amount: tuple[type[ProgressColumn], ...] = COUNT, shown: bool = True
) -> Iterator[Callable[..., None]]:
    """A bar that disappears at the end, as a function that advances it: by one, or by the number that it gets.

    Args:
        total: number of things, or of bytes.
        amount: columns that show how much is done: `COUNT` or `BYTES`.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), *(column() for column in amount), TimeElapsedColumn())
    # Without ipywidgets rich can only warn in a notebook: plain text works there too.
    console = Console(stderr=True, force_jupyter=None if find_spec("ipywidgets") else False)
    with Progress(*columns, console=console, disable=not shown, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield partial(bar.advance, task)
