"""Text input to a command, from a person or a pipe."""

import io
import sys


def accept_any_bytes() -> None:
    """Let stdin accept bytes that are not UTF-8, as Python does for command-line arguments.

    Without this, reading such bytes would fail with a traceback. `check_unicode` later refuses the text with a clear
    message.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
