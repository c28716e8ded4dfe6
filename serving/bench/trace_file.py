"""Traces of real traffic: lengths and arrival times of requests."""

import itertools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from amoeba_jax.errors import ConfigError
from serving.bench.statistics_trace import KEYS, draw_specs
from serving.bench.text_trace import SUFFIXES, is_text_trace, read_text_trace

BLOCK_TOKENS = 512
"""Tokens of a prompt block in Mooncake's traces."""
_LENGTHS = ("input_tokens", "output_tokens")


@dataclass(frozen=True)
class Trace:
    """Requests of a trace, in the order of arrival.

    Attributes:
        input_tokens: prompt lengths, int64.
        output_tokens: output lengths, int64.
        arrival_s: seconds since the first arrival, float64. None: the file has no times.
        prefix_blocks: ids of the blocks (series of tokens) of each prompt, by index of the request. Two prompts that
            share an id are equal up to the end of this block. None: the file has no ids.
        kinds: class of each request, as an index into `kind_names`. None: the file has no classes.
        kind_names: names of the classes.
        priorities: priority of each request. None: the file has no priorities.
    """

    input_tokens: np.ndarray
    output_tokens: np.ndarray
    arrival_s: np.ndarray | None
    prefix_blocks: Mapping[int, tuple[int, ...]] | None = None
    kinds: np.ndarray | None = None
    kind_names: tuple[str, ...] = ()
    priorities: np.ndarray | None = None


@dataclass(frozen=True)
class Draw:
    """Settings for drawing requests from a file of statistics. The fields are the arguments of `draw_specs`."""

    random: np.random.Generator
    duration_s: float | None = None
    rate_scale: float = 1.0
    most: int | None = None


def read_trace(path: Path, draw: Draw | None = None) -> Trace:
    """Read a file with a trace of requests. Raises `ConfigError` for an invalid file.

    There are three kinds of files:

    * A .csv or .jsonl file of requests: see `serving.bench.text_trace`.
    * A .npz file of requests. It has the integer arrays `input_tokens` and `output_tokens`. It may also have
      `arrival_s` in seconds, and the ids of prompt blocks: `hash_ids[hash_ptr[i]:hash_ptr[i + 1]]` for request `i`.
    * A .npz file of statistics: see `serving.bench.statistics_trace`. Requests are drawn with the settings `draw`, by
      default with the seed 0.
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
            raise ConfigError(f"{name} of the trace {path} has {values.min()}: lengths must be at least 0")
    inputs, outputs = (values.astype(np.int64) for values in lengths)
    names, kinds = np.unique(arrays["class"], return_inverse=True) if "class" in arrays else ((), None)
    more = (kinds, tuple(map(str, names)), arrays.get("priority"))
    if "arrival_s" not in arrays:
        return Trace(inputs, outputs, None, None if blocks is None else dict(enumerate(blocks)), *more)
    times = arrays["arrival_s"]
    if times.shape != inputs.shape or times.dtype.kind not in "iuf" or not np.isfinite(times).all():
        raise ConfigError(
            f"arrival_s of the trace {path} is {times.dtype} of shape {times.shape}: "
            f"it must be {inputs.size} finite numbers, one for each request"
        )
    order = np.argsort(times, kind="stable")
    times = times[order].astype(np.float64)
    ordered = None if blocks is None else {place: blocks[row] for place, row in enumerate(order.tolist())}
    kinds, priorities = (None if column is None else column[order] for column in (kinds, arrays.get("priority")))
    return Trace(inputs[order], outputs[order], times - times[0], ordered, kinds, more[1], priorities)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ConfigError(f"the trace {path} is a single array: it must be a .npz file with named arrays")
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
    """Return a trace with `scale` times as many requests in the same time.

    With a scale of 0.3, a random 30% of the requests remain. With a scale of 2.3, each request occurs twice, and a
    random 30% of the requests occur a third time. A copy arrives within 30 s of its original.

    Copies stand for other users. If two originals share a prefix, their first copies share another prefix, and their
    second copies share a third prefix. A copy shares no prefix with its original.
    """
    size = len(trace.input_tokens)
    whole = int(scale)
    times = whole + (random.permutation(size) < round((scale - whole) * size))
    rows = np.repeat(np.arange(size), times)
    copies = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)
    arrivals = None
    if trace.arrival_s is not None:
        arrivals = np.abs(trace.arrival_s[rows] + (copies > 0) * random.uniform(-30.0, 30.0, len(rows)))
        order = np.argsort(arrivals, kind="stable")
        rows, copies, arrivals = rows[order], copies[order], arrivals[order]
    blocks = None if trace.prefix_blocks is None else _of_copies(trace.prefix_blocks, rows, copies)
    kinds, priorities = (None if column is None else column[rows] for column in (trace.kinds, trace.priorities))
    return replace(
        trace, input_tokens=trace.input_tokens[rows], output_tokens=trace.output_tokens[rows], arrival_s=arrivals,
        prefix_blocks=blocks, kinds=kinds, priorities=priorities,
    )  # fmt: skip


def _of_copies(
    blocks: Mapping[int, tuple[int, ...]], rows: np.ndarray, copies: np.ndarray
) -> dict[int, tuple[int, ...]]:
    """Return the ids of the prompt blocks of each request, by index. A request is an original or a copy.

    Blocks of copies get new ids. The n-th copies of two originals share an id if the two originals share an id.

    Args:
        blocks: block ids of the originals, by row.
        rows: for each request, the row of its original.
        copies: for each request, 0 if it is an original, or n if it is the n-th copy of its original.
    """
    stride = 1 + max((max(ids) for ids in blocks.values() if ids), default=0)
    pairs = enumerate(zip(rows.tolist(), copies.tolist(), strict=True))
    return {place: tuple([block + copy * stride for block in blocks[row]]) for place, (row, copy) in pairs}


def fit_context(inputs: np.ndarray, outputs: np.ndarray, max_model_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Shorten prompts and outputs so that each prompt and its output together have at most `max_model_len` tokens.

    Return the new lengths as `(inputs, outputs)`. If a prompt and its output are both longer than half of
    `max_model_len`, both are shortened to half. If one is longer, only this one is shortened.
    """
    half = max_model_len // 2
    outputs = np.minimum(outputs, np.maximum(half, max_model_len - inputs))
    return np.minimum(inputs, max_model_len - outputs), outputs
