"""Reader of request traces in CSV or JSON lines.

Each row of a trace has a time, a number of prompt tokens and a number of output tokens.
"""

import csv
import gzip
import io
import json
import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from amoeba_jax.errors import ConfigError

SUFFIXES = (".csv", ".jsonl", ".csv.gz", ".jsonl.gz")
_SECONDS = ("arrival_s", "arrival", "time_s")
_STAMPS = ("timestamp",)
_INPUTS = ("input_tokens", "prompt_tokens", "input_length", "contexttokens", "num_prefill_tokens", "prompt", "input")
_OUTPUTS = ("output_tokens", "completion_tokens", "output_length", "generatedtokens", "num_decode_tokens", "output")
_BLOCKS = "hash_ids"
_CLASS, _PRIORITY = "class", "priority"
MAX_CLASSES, MAX_CLASS_LENGTH = 100, 64


def is_text_trace(path: Path) -> bool:
    """Return whether the suffix of a file, such as `.csv` or `.jsonl.gz`, says that it is CSV or JSON lines."""
    return path.name.lower().endswith(SUFFIXES)


def read_text_trace(path: Path) -> tuple[dict[str, np.ndarray], list[tuple[int, ...]] | None]:
    """Read a trace file. Return `(columns, blocks)`. Raises `ConfigError` for an invalid file.

    `columns` has one array for each column of the file: `input_tokens`, `output_tokens`, `arrival_s` in seconds,
    `class` as texts, and `priority` as integers. The last three arrays are missing if the file has no such columns.

    `blocks` has the ids of the prompt blocks of each row, from the column `hash_ids` (as in Mooncake's traces). It is
    None if the file has no such column.

    Times in the file are seconds in a column `arrival_s`, `arrival` or `time_s`. A column `timestamp` has ISO dates
    (Azure) or milliseconds (Mooncake).
    """
    rows = list(_rows(path))
    if not rows:
        raise ConfigError(f"the trace {path} has no rows")
    names = list(rows[0][1])
    if None in names:
        raise ConfigError(f"the trace {path}, line {rows[0][0]}, has more cells than the first line has columns")
    by_name = {name.strip().lower(): name for name in names}
    stamp = _find(by_name, _SECONDS) or _find(by_name, _STAMPS)
    prompt, output = _find(by_name, _INPUTS), _find(by_name, _OUTPUTS)
    for what, found, wanted in (("prompt tokens", prompt, _INPUTS), ("output tokens", output, _OUTPUTS)):
        if found is None:
            raise ConfigError(
                f"the trace {path} has no column of {what} named {wanted[0]}; it has {', '.join(map(str, names))}"
            )
    assert prompt is not None, "checked above"
    assert output is not None, "checked above"
    columns: dict[str, np.ndarray] = {
        "input_tokens": np.array([_length(path, line, row, prompt) for line, row in rows], np.int64),
        "output_tokens": np.array([_length(path, line, row, output) for line, row in rows], np.int64),
    }
    if stamp is not None:
        times = [_time_s(path, line, row, stamp) for line, row in rows]
        columns["arrival_s"] = np.array(times, np.float64)
    if (kind := by_name.get(_CLASS)) is not None:
        columns["class"] = np.array([_class(path, line, row, kind) for line, row in rows])
        if (count := len(set(columns["class"].tolist()))) > MAX_CLASSES:
            raise ConfigError(f"the trace {path} has {count} classes: at most {MAX_CLASSES} are allowed")
    if (level := by_name.get(_PRIORITY)) is not None:
        columns["priority"] = np.array([_priority(path, line, row, level) for line, row in rows], np.int64)
    blocks = None
    if _BLOCKS in rows[0][1]:
        blocks = [_block_ids(path, line, row.get(_BLOCKS)) for line, row in rows]
    return columns, blocks


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix.lower() == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    if ".csv" in path.name.lower():
        yield from enumerate(csv.DictReader(io.StringIO(text)), 2)
        return
    for line, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except ValueError as error:
            raise ConfigError(f"the trace {path}, line {line}, is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"the trace {path}, line {line}: it must be an object, not {type(row).__name__}")
        yield line, row


def _find(by_name: dict[str, str], wanted: Iterable[str]) -> str | None:
    return next((by_name[name] for name in wanted if name in by_name), None)


def _block_ids(path: Path, line: int, value: Any) -> tuple[int, ...]:
    """Return the ids of the prompt blocks of a row. An empty `value` gives an empty tuple.

    `value` is a list from a JSON file, or the text of a JSON list from a CSV file.
    """
    try:
        ids = json.loads(value) if isinstance(value, str) and value.strip() else value or []
        if not isinstance(ids, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"the trace {path}, line {line}: {_BLOCKS}={value!r:.100} must be a list of integers"
        ) from None
    return tuple(ids)


def _class(path: Path, line: int, row: dict[str, Any], name: str) -> str:
    value = str(row.get(name) or "").strip()
    if not 0 < len(value) <= MAX_CLASS_LENGTH or not value.isprintable():
        raise ConfigError(
            f"the trace {path}, line {line}: {name}={value!r:.100} must be a text of 1 to {MAX_CLASS_LENGTH} characters"
        )
    return value


def _priority(path: Path, line: int, row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    try:
        level = 0 if value in (None, "") else int(value)  # type: ignore[arg-type]
        if (isinstance(value, float) and value != level) or abs(level) >= 2**31:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"the trace {path}, line {line}: {name}={value!r:.100} must be an integer between -2^31 and 2^31"
        ) from None
    return level


def _length(path: Path, line: int, row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    try:
        length = float(value)  # type: ignore[arg-type]
        if length != int(length) or length < 0:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"the trace {path}, line {line}: {name}={value!r} must be a number of tokens, 0 or more"
        ) from None
    return int(length)


def _time_s(path: Path, line: int, row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    stamp = name.strip().lower() in _STAMPS
    try:
        seconds = float(value) / (1000 if stamp else 1)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        try:
            seconds = datetime.fromisoformat(str(value).strip()[:26]).timestamp() if stamp else math.nan
        except ValueError:
            seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(
            f"the trace {path}, line {line}: {name}={value!r} must be "
            + ("milliseconds, 0 or more, or a date in ISO form" if stamp else "seconds, 0 or more")
        )
    return seconds
