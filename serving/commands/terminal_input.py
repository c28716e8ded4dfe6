"""Text that a person or a pipe gives to a command."""

import io
import sys


def accept_any_bytes() -> None:
    """Let stdin accept bytes that are not UTF-8. They become unpaired surrogates, as in arguments of Python.

    Otherwise, reading such bytes would fail with a traceback. Later, `check_unicode` refuses the text and names their
    position.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
