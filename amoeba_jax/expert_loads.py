"""Loads of experts: their file, their distribution over shards, and the imbalance between ranks."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from amoeba_jax.errors import ConfigError
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.shorten import shorten
from sharding.placement import Placement

MAX_FILE_BYTES = 64 << 20
_FIELD = "expert_loads"


@dataclass(frozen=True, eq=False)
class ExpertLoadReport:
    """Result of `LLM.expert_loads`: loads of the experts since the start of the engine.

    Attributes:
        tokens: number of tokens that each expert of each layer has computed, with experts in the order of the model.
        imbalance: load imbalance between the ranks of an instance (`load_imbalance`), for each instance id.
    """

    tokens: Int64[np.ndarray, "layers E"]
    imbalance: dict[int, float]

    def save(self, path: str | Path) -> None:
        """Write the file that `LLM(..., expert_loads=path)` reads."""
        Path(path).write_text(json.dumps({_FIELD: self.tokens.tolist()}) + "\n")


def read_order(path: str | None, model: ModelConfig, max_tp: int) -> tuple[tuple[int, ...], ...]:
    """Read a file of `ExpertLoadReport.save`. Return an order of the experts for each layer (`ModelDims.expert_order`).

    The orders give all shards about equal loads (`deal`). The result is empty if `path` is None. The result is also
    empty if `max_tp` does not divide the number of experts, because each rank then has a part of every expert.

    Raises `ConfigError` if the file cannot be read, or does not fit the model.
    """
    if path is None:
        return ()
    if model.experts is None:
        raise ConfigError(f"expert_loads={path!r}: {model.family} has no experts")
    try:
        if (size := Path(path).stat().st_size) > MAX_FILE_BYTES:
            raise ConfigError(f"expert_loads={path!r} has {size} bytes; the limit is {MAX_FILE_BYTES}")
        loads = json.loads(Path(path).read_text())[_FIELD]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"expert_loads={path!r} cannot be read: {type(error).__name__}: {error}") from error
    expected = model.num_layers, model.experts.count
    rows = [row for row in loads if isinstance(row, list)] if isinstance(loads, list) else []
    if len(rows) != expected[0] or any(len(row) != expected[1] for row in rows) or len(loads) != len(rows):
        raise ConfigError(
            f"expert_loads={path!r} must have {expected[0]} lists (layers) of {expected[1]} numbers (experts)"
        )
    for value in (value for row in rows for value in row):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
            raise ConfigError(f"expert_loads={path!r}: {shorten(value)} must be an integer from 0 to 2**53 - 1")
    if model.experts.count % max_tp:
        return ()
    return tuple(deal(np.array(row, np.int64), max_tp) for row in rows)


def deal(loads: Int64[np.ndarray, " E"], num_shards: int) -> tuple[int, ...]:
    """Distribute experts over `num_shards` shards, so that all shards have equally many experts and about equal loads.

    Experts are assigned in the order of their loads, largest load first. Each expert goes to the shard with the
    smallest load among the shards that are not full. Return the indices of the experts of shard 0 in ascending order,
    then the indices of shard 1, and so on.
    """
    size = len(loads) // num_shards
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    totals = [0] * num_shards
    for expert in np.argsort(-loads, kind="stable").tolist():
        shard = min((s for s in range(num_shards) if len(shards[s]) < size), key=lambda s: (totals[s], len(shards[s])))
        shards[shard].append(expert)
        totals[shard] += int(loads[expert])
    return tuple(expert for shard in shards for expert in sorted(shard))


def model_order(dims: ModelDims, tokens: Int64[np.ndarray, "layers E"]) -> Int64[np.ndarray, "layers E"]:
    """Reorder the experts in `tokens` from the order of the shards (`dims.expert_order`) to the order of the model."""
    if not dims.expert_order:
        return tokens
    result = np.zeros_like(tokens)
    np.put_along_axis(result, np.array(dims.expert_order), tokens, axis=1)
    return result


def load_imbalance(dims: ModelDims, placement: Placement, totals: Mapping[int, Any]) -> float:
    """Return the load imbalance between ranks: 1 if all loads are equal, p if one of p ranks has all tokens.

    The load of a rank in a layer is the number of (token, expert) pairs that the rank computes. In each layer, the
    ranks have a largest load and a mean load. The result is the sum of all largest loads divided by the sum of all mean
    loads. The largest load counts because every layer waits for its slowest rank. The result is also 1 before the first
    token, and if every rank has a part of every expert.

    Args:
        dims: sizes of the model.
        placement: placement of the instance.
        totals: int64 `[layers, E]` for each device: number of tokens of each expert since the start of the engine, with
            experts in the order of the shards. Tokens of earlier instances on the device are included.
    """
    if not dims.experts.whole:
        return 1.0
    largest = mean = 0.0
    for layer, homes in enumerate(placement.ffn):
        for home in sorted(set(homes)):
            loads = rank_loads(dims, home.degree, [totals[d][layer] for d in home.devices if d in totals])
            largest, mean = largest + loads.max(), mean + loads.mean()
    return float(largest / mean) if mean else 1.0


def rank_loads(dims: ModelDims, tp: int, rows: Sequence[Int64[np.ndarray, " E"]]) -> Int64[np.ndarray, " tp"]:
    """Return the number of tokens that the experts of each rank get at degree `tp`, in all `rows` together.

    Each item of `rows` has the number of tokens of each expert, with experts in the order of the shards.
    """
    experts = sum(rows, start=np.zeros(dims.load_shape[1], np.int64))
    shards = experts.reshape(dims.max_tp, -1).sum(axis=1)
    return shards.reshape(-1, tp).sum(axis=0)  # rank r computes the shards r, r + tp, ...
