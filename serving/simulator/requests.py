"""Requests of a simulation, as a table with one array for each column."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.bench.trace_file import BLOCK_TOKENS
from serving.scheduler import WaitingRequest
from serving.simulator.errors import SimulationError
from serving.simulator.prefix_store import PromptBlocks


@dataclass(frozen=True)
class RequestTable:
    """Table with a row for each request, in the order of arrival. A request is identified by its row.

    Arrivals are in seconds since the start, and lengths are in tokens.
    """

    arrival_s: np.ndarray
    input_len: np.ndarray
    output_len: np.ndarray
    """Number of tokens that the request generates."""
    max_tokens: np.ndarray
    """Maximum number of output tokens. The scheduler sees this number, but not `output_len`."""
    kinds: np.ndarray
    """Class of the request, as an index into `kind_names`."""
    kind_names: tuple[str, ...] = ("all",)
    priority: np.ndarray | None = None
    deadline_s: np.ndarray | None = None
    """Deadline in seconds after arrival. NaN in this column, `ttft_slo_s` or `tpot_slo_s` means no limit."""
    ttft_slo_s: np.ndarray | None = None
    tpot_slo_s: np.ndarray | None = None
    prefix_blocks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Ids of the prompt's blocks (see `prefix_store`), by row. Rows with unknown blocks are missing."""
    prefix_block_tokens: float = BLOCK_TOKENS
    """Number of tokens in a block."""
    max_model_len: int | None = None
    """Context of the model in tokens. Longer requests are refused at arrival. None: there is no limit."""
    names: Sequence[str] | None = None
    """Ids of the requests. None: `r0`, `r1`, and so on."""

    def __post_init__(self) -> None:
        size = len(self.arrival_s)
        for name in ("input_len", "output_len", "max_tokens", "kinds"):
            if len(getattr(self, name)) != size:
                raise SimulationError(f"{name} has {len(getattr(self, name))} rows, and arrival_s has {size}")
        if size and (np.diff(self.arrival_s) < 0).any():
            raise SimulationError("arrival_s must ascend")
        if size and self.arrival_s[0] < 0:
            raise SimulationError(f"arrival_s begins at {self.arrival_s[0]:g}: no request may arrive before 0")
        if size and (self.input_len.min() < 1 or self.output_len.min() < 1):
            raise SimulationError("lengths must be at least 1 token")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Seconds from the start to the last arrival."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    @property
    def too_long(self) -> np.ndarray:
        """Bool for each request: whether prompt and output together exceed `max_model_len`."""
        lengths = self.input_len + self.output_len
        return np.zeros(len(self), bool) if self.max_model_len is None else lengths > self.max_model_len

    def name(self, index: int) -> str:
        """Return the id of the request in row `index`."""
        return f"r{index}" if self.names is None else self.names[index]

    def prompt_blocks(self, index: int) -> PromptBlocks | None:
        """Return the blocks by which the prefix cache finds the prompt of the request in row `index`. None: unknown."""
        if (ids := self.prefix_blocks.get(index)) is None:
            return None
        size = self.prefix_block_tokens
        return PromptBlocks(ids[: math.ceil(int(self.input_len[index]) / size)], size)

    def waiting(self, index: int) -> WaitingRequest:
        """Return the request in row `index` as the scheduler sees it at arrival."""
        prompt, arrival_s = int(self.input_len[index]), float(self.arrival_s[index])
        limit_s = _number(self.deadline_s, index)
        deadline_s = None if limit_s is None else arrival_s + limit_s
        return WaitingRequest(
            self.name(index),
            prompt,
            prompt + int(self.max_tokens[index]),
            0 if self.priority is None else int(self.priority[index]),
            arrival_s,
            deadline_s,
            ttft_slo_s=_number(self.ttft_slo_s, index),
            tpot_slo_s=_number(self.tpot_slo_s, index),
        )


def _number(column: np.ndarray | None, index: int) -> float | None:
    """Return element `index` of a column. Return None if the element is NaN, or if the column is None."""
    value = math.nan if column is None else float(column[index])
    return None if math.isnan(value) else value
