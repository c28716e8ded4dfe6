"""Measured times of matrix products, read from CSV files in the format of microsoft/vidur."""

import bisect
import csv
import gzip
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.simulator.errors import SimulationError

_OPERATORS = {
    "attn_pre_proj": "qkv",
    "attn_post_proj": "attention_out",
    "mlp_up_proj": "gate_up",
    "mlp_down_proj": "down",
}
_SHAPE = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "num_tokens", "num_tensor_parallel_workers")


@dataclass(frozen=True)
class OperatorPoint:
    """Measured median time of a matrix product with `tokens` rows, in seconds.

    `inputs` and `outputs` are the sizes of the part of the matrix on one device.
    """

    operator: str
    inputs: int
    outputs: int
    tokens: int
    seconds: float


def read_points(path: Path) -> list[OperatorPoint]:
    """Return all measurements in a `.csv` or `.csv.gz` file. Raises `SimulationError` if the file is invalid."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, ValueError) as error:
        raise SimulationError(f"--profile {path} cannot be read: {error}") from error
    reader = csv.DictReader(io.StringIO(text))
    wanted = [*_SHAPE, "use_gated_mlp", *(f"time_stats.{name}.median" for name in _OPERATORS)]
    missing = [name for name in wanted if name not in (reader.fieldnames or ())]
    if missing:
        raise SimulationError(f"--profile {path} has no column {missing[0]}: it must be an operator profile of vidur")
    points = []
    for line, row in enumerate(reader, 2):
        try:
            points += _points(row)
        except ValueError as error:
            raise SimulationError(f"--profile {path}, line {line}: {error}") from None
    if not points:
        raise SimulationError(f"--profile {path} has no rows")
    return points


def _points(row: dict[str, str]) -> Iterable[OperatorPoint]:
    heads, kv_heads, hidden, ffn, tokens, degree = (int(row[name]) for name in _SHAPE)
    head_dim = hidden // heads
    up = ffn * (2 if row["use_gated_mlp"] == "True" else 1)
    shapes = {
        "attn_pre_proj": (hidden, (heads + 2 * kv_heads) * head_dim // degree),
        "attn_post_proj": (hidden // degree, hidden),
        "mlp_up_proj": (hidden, up // degree),
        "mlp_down_proj": (ffn // degree, hidden),
    }
    for name, (inputs, outputs) in shapes.items():
        seconds = float(row[f"time_stats.{name}.median"]) / 1e3
        if seconds <= 0:
            raise ValueError(f"time_stats.{name}.median={seconds * 1e3:g} must be above 0")
        yield OperatorPoint(_OPERATORS[name], inputs, outputs, tokens, seconds)


class OperatorProfile:
    """Measured times of matrix products by matrix shape.

    Times between two measured numbers of tokens are interpolated.
    """

    def __init__(self, points: Iterable[OperatorPoint]):
        samples: dict[tuple[int, int], dict[int, list[float]]] = {}
        for point in points:
            samples.setdefault((point.inputs, point.outputs), {}).setdefault(point.tokens, []).append(point.seconds)
        self._tables = {
            shape: (sorted(times), [_median(times[tokens]) for tokens in sorted(times)])
            for shape, times in samples.items()
        }

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "OperatorProfile":
        """Return a profile from files that were measured on devices of one kind.

        Raises `SimulationError` if a file is invalid.
        """
        return cls(point for path in paths for point in read_points(path))

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """`(inputs, outputs)` of each measured matrix."""
        return tuple(self._tables)

    def seconds(self, inputs: int, outputs: int, tokens: int) -> float | None:
        """Return the seconds of a matrix product with `tokens` rows. None: the matrix was not measured.

        Above the largest measured number of rows, the time grows in proportion to the rows. Below the smallest measured
        number of rows, the time is constant.
        """
        if (table := self._tables.get((inputs, outputs))) is None:
            return None
        counts, times = table
        place = bisect.bisect_left(counts, tokens)
        if place == len(counts):
            return times[-1] * tokens / counts[-1]
        if counts[place] == tokens or place == 0:
            return times[place]
        share = (tokens - counts[place - 1]) / (counts[place] - counts[place - 1])
        return times[place - 1] + share * (times[place] - times[place - 1])


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
