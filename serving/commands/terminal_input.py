"""Text input to a command, from a person or a pipe."""

import io
import sys


def accept_any_bytes() -> None:
    """Let stdin accept bytes that are not UTF-8, as Python does for command-line arguments.

    `check_unicode` later refuses text with these bytes, with a clear message. Without this function, reading the text
    would end with a traceback.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
