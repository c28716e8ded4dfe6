"""Traces of real traffic: how long requests were, and when they came."""

import itertools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from amoeba_jax.errors import ConfigError
from serving.bench.statistics_trace import KEYS, draw_specs
from serving.bench.text_trace import SUFFIXES, is_text_trace, read_text_trace

_LENGTHS = ("input_tokens", "output_tokens")


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival: `input_tokens` and `output_tokens` int64, `arrival_s` float64 seconds
    from the first one, or None where the file has no times."""

    input_tokens: np.ndarray
    output_tokens: np.ndarray
    arrival_s: np.ndarray | None
    prefix_blocks: Mapping[int, tuple[int, ...]] | None = None
    """Ids of the blocks of a prompt by the request's place, where the file has them: equal ids are equal tokens."""


@dataclass(frozen=True)
class Draw:
    """How requests are drawn from a file that has statistics instead of requests."""

    random: np.random.Generator
    duration_s: float | None = None
    rate_scale: float = 1.0
    most: int | None = None


def read_trace(path: Path, draw: Draw | None = None) -> Trace:
    """A trace in a .npz file with the arrays `input_tokens` and `output_tokens` (integers, one for each request) and
    possibly `arrival_s` (seconds); one in CSV or JSON lines (`serving.bench.text_trace`); or, with `draw`, requests
    drawn from a .npz file of statistics (`serving.bench.statistics_trace`).

    Raises `ConfigError` for a file that is none of these.
    """
    blocks: list[tuple[int, ...]] | None = None
    if is_text_trace(path):
        arrays, blocks = read_text_trace(path)
    else:
        arrays = _read_arrays(path)
        if "rate_rps" in arrays:
            draw = draw or Draw(np.random.default_rng(0))
            arrays = draw_specs(path, arrays, draw.random, draw.duration_s, draw.rate_scale, draw.most)
        elif "hash_ptr" in arrays:
            ids, ends = arrays["hash_ids"].tolist(), arrays["hash_ptr"].tolist()
            blocks = [tuple(ids[start:end]) for start, end in itertools.pairwise(ends)]
    return _checked(path, arrays, blocks)


def _checked(path: Path, arrays: dict[str, np.ndarray], blocks: list[tuple[int, ...]] | None) -> Trace:
    lengths = [arrays[name] for name in _LENGTHS]
    for name, values in zip(_LENGTHS, lengths, strict=True):
        if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iu":
            raise ConfigError(
                f"{name} of the trace {path} is {values.dtype} of shape {values.shape}: it must be a list of integers"
            )
        if values.size != lengths[0].size:
            raise ConfigError(f"{name} of the trace {path} has {values.size} values, input_tokens {lengths[0].size}")
        if values.min() < 0:
            raise ConfigError(f"{name} of the trace {path} has {values.min()}: no length may be below 0")
    inputs, outputs = (values.astype(np.int64) for values in lengths)
    if "arrival_s" not in arrays:
        return Trace(inputs, outputs, None, None if blocks is None else dict(enumerate(blocks)))
    times = arrays["arrival_s"]
    if times.shape != inputs.shape or times.dtype.kind not in "iuf" or not np.isfinite(times).all():
        raise ConfigError(
            f"arrival_s of the trace {path} is {times.dtype} of shape {times.shape}: "
            f"it must be {inputs.size} finite numbers, one for each request"
        )
    order = np.argsort(times, kind="stable")
    times = times[order].astype(np.float64)
    ordered = None if blocks is None else {place: blocks[row] for place, row in enumerate(order.tolist())}
    return Trace(inputs[order], outputs[order], times - times[0], ordered)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ConfigError(f"the trace {path} is a single array: it must be a .npz file with named ones")
        with file:
            if all(name in file.files for name in KEYS):
                return {name: file[name] for name in file.files}
            missing = [name for name in _LENGTHS if name not in file.files]
            if missing:
                has = ", ".join(sorted(file.files)) or "nothing"
                raise ConfigError(f"the trace {path} has no {' and no '.join(missing)}: it has {has}")
            wanted = (*_LENGTHS, "arrival_s", "hash_ids", "hash_ptr")
            return {name: file[name] for name in wanted if name in file.files}
    except ConfigError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"the trace {path} cannot be read as a .npz file, and does not end in {', '.join(SUFFIXES)}: {error}"
        ) from error


def scale_rate(trace: Trace, scale: float, random: np.random.Generator) -> Trace:
    """As many requests as `scale` times those of a trace, in the same time: each comes as often as the factor's whole
    part says, and once more with the probability of the rest. Further ones come within 30 s of the one they are like.
    """
    size = len(trace.input_tokens)
    times = np.floor(scale + random.random(size)).astype(np.int64)
    rows = np.repeat(np.arange(size), times)
    again = np.concatenate([[False], rows[1:] == rows[:-1]]) if len(rows) else np.zeros(0, bool)
    blocks = trace.prefix_blocks
    if trace.arrival_s is None:
        kept = None if blocks is None else {place: blocks[row] for place, row in enumerate(rows.tolist())}
        return Trace(trace.input_tokens[rows], trace.output_tokens[rows], None, kept)
    arrivals = trace.arrival_s[rows] + again * random.uniform(-30.0, 30.0, len(rows))
    arrivals = np.abs(arrivals)
    order = np.argsort(arrivals, kind="stable")
    rows, arrivals = rows[order], arrivals[order]
    kept = None if blocks is None else {place: blocks[row] for place, row in enumerate(rows.tolist())}
    return Trace(trace.input_tokens[rows], trace.output_tokens[rows], arrivals, kept)
