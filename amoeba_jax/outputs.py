"""What requests return."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request. `arrival` is on the clock of `time.monotonic`; the rest are durations in seconds."""

    arrival: float
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    """(End to end - TTFT) / (tokens - 1); None with fewer than two tokens."""


@dataclass(frozen=True)
class CompletionOutput:
    """One generated continuation. `finish_reason` is None while it grows."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request with what has been generated for it."""

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    new_text: str = field(default="", compare=False)
    """Text added since the previous output of a stream."""

    @property
    def finished(self) -> bool:
        return self.outputs[0].finish_reason is not None
