"""Error handling of the command line: one line on stderr, and an exit code."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import typer

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def say(text: str) -> None:
    """Print a line on stderr. Ignore errors, such as a closed terminal or a full disk."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def flush_or_discard(stream: TextIO | None) -> None:
    """Flush a stream. If that fails, redirect the stream to the null device.

    Without the redirection, Python would flush the stream again at exit, fail again, and exit with 120.
    """
    if stream is None or stream.closed:
        return
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextmanager
def clean_exit() -> Iterator[None]:
    """Turn errors that users can cause into a message without a traceback, and an exit code.

    The exit code is 2 for an invalid setting, model name or request. It is 1 for a damaged checkpoint or a closed
    stdout, and 130 for Ctrl-C. Other errors are bugs and keep their traceback. Import the modules of a command inside
    the `with` block, so that Ctrl-C during the imports is handled too.
    """
    try:
        yield
    except KeyboardInterrupt:
        say("\ninterrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        flush_or_discard(sys.stdout)
        raise typer.Exit(EXIT_FAILURE) from None
    except ValueError as error:
        from amoeba_jax import errors

        if not isinstance(error, tuple(getattr(errors, name) for name in errors.__all__)):
            raise
        say(f"error: {error}")
        damaged = isinstance(error, errors.CheckpointError)
        raise typer.Exit(EXIT_FAILURE if damaged else EXIT_USAGE) from None
