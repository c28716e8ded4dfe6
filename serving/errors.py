"""Errors as the command line shows them: one line on stderr and an exit code."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import typer

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def say(text: str) -> None:
    """A line for the terminal; what goes on does so where no one can read it, or its disk is full."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def flush_or_discard(stream: TextIO | None) -> None:
    """Write what is left, or have it go nowhere: Python tries once more as it ends, and where that fails ends with 120,
    whatever its exit code was to be."""
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
    """Turn the errors that users can cause into a message without a traceback.

    Exit codes: 2 for a setting, model name or request that cannot work; 1 for a damaged checkpoint, or if the
    reader of our output went away; 130 for Ctrl-C. Anything else is a bug and keeps its traceback.
    """
    # Here, because the commands' own imports (JAX, transformers) take seconds in which Ctrl-C must work too.
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
