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
    """Show a progress bar inside a context. Yield a function that advances the bar by its argument (default: 1).

    Args:
        description: text before the bar.
        total: number of items or bytes.
        amount: columns for the progress: `COUNT` or `BYTES`.
        shown: whether to show the bar.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), *(column() for column in amount), TimeElapsedColumn())
    # Without ipywidgets, rich would print a warning in notebooks instead of a bar. Plain text works there.
    console = Console(stderr=True, force_jupyter=None if find_spec("ipywidgets") else False)
    with Progress(*columns, console=console, disable=not shown, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield partial(bar.advance, task)
