"""Text that a person or a pipe gives to a command."""

import io
import sys


def accept_any_bytes() -> None:
    """Read bytes of stdin that are not UTF-8 as unpaired surrogates, as Python does with arguments.

    `check_unicode` then refuses them with their position. Without this, reading would fail with a traceback.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
