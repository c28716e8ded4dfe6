"""Errors as the command line shows them: one line on stderr and an exit code."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


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
        print("\ninterrupted", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # Python flushes stdout once more at exit: give it somewhere to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILURE) from None
    except ValueError as error:
        from amoeba_jax import errors

        if not isinstance(error, tuple(getattr(errors, name) for name in errors.__all__)):
            raise
        print(f"error: {error}", file=sys.stderr)
        damaged = isinstance(error, errors.CheckpointError)
        raise typer.Exit(EXIT_FAILURE if damaged else EXIT_USAGE) from None
