"""Short forms of values that clients sent, for error messages."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

# Maximum number of shown elements of a list or mapping.
_MAX_ELEMENTS = 8
# Integers of more bits are not written out: Python needs quadratic time for their digits, and refuses from 4,300 on.
_MAX_BITS = 256


def shorten(value: Any, max_chars: int = 100) -> str:
    """Return the `repr` of a value, cut to about `max_chars` characters.

    Only the first elements and characters of a large value are read, so the cost depends on `max_chars` alone.
    """
    return _cut(_short(value, max_chars, depth=2), max_chars)


def _short(value: Any, max_chars: int, depth: int) -> str:
    if isinstance(value, str | bytes):
        text = repr(value[:max_chars])
        return text if len(value) <= max_chars else f"{text}... ({len(value)} long)"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, Mapping):
        if depth == 0:
            return "{...}"
        pairs = (
            f"{_short(key, max_chars, depth - 1)}: {_short(item, max_chars, depth - 1)}"
            for key, item in islice(value.items(), _MAX_ELEMENTS)
        )
        return "{" + _joined(pairs, len(value), max_chars) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        opening, closing = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
        if depth == 0:
            return f"{opening}...{closing}"
        items = (_short(item, max_chars, depth - 1) for item in islice(value, _MAX_ELEMENTS))
        return opening + _joined(items, len(value), max_chars) + closing
    if isinstance(value, bool | int | float | complex) or value is None:
        return repr(value)
    # The repr of other types can take any amount of time.
    try:
        length = len(value)
    except TypeError:
        return _cut(repr(value), max_chars)
    return f"{type(value).__name__} of {length} elements"


def _joined(parts: Any, length: int, max_chars: int) -> str:
    """Join parts, up to about `max_chars` characters. If some of `length` parts are left out, append their number."""
    taken: list[str] = []
    size = 0
    for part in parts:
        taken.append(part)
        size += len(part)
        if size > max_chars:
            break
    more = length - len(taken)
    return ", ".join(taken) + (f", ... ({more} more)" if more else "")


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars + 40 else f"{text[:max_chars]}..."
