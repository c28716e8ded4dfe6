"""Load generator: sends planned requests, and records the times and tokens of each request."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import grpc

from amoeba_jax.client import AsyncClient, ModelInfo
from amoeba_jax.sampling_params import SamplingParams
from serving.bench.load_config import LoadConfig
from serving.bench.workload import PlannedRequest


class Outcome(StrEnum):
    """How a request ended."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Ended by Ctrl-C."""


@dataclass
class Record:
    """Times and tokens of one request. Times are in seconds since the start of the run."""

    request: PlannedRequest
    arrival_s: float
    """Arrival time: `request.arrival_s`, or later if this program could not keep up."""
    start_s: float | None = None
    """Time of sending. Later than `arrival_s` if `max_concurrency` delayed the request. None: never sent."""
    chunk_times: list[float] = field(default_factory=list)
    """Arrival times of messages with tokens."""
    chunk_tokens: list[int] = field(default_factory=list)
    """Number of tokens of each message."""
    end_s: float | None = None
    outcome: Outcome = Outcome.RUNNING
    status: str = ""
    """Name of the gRPC status of a failed request."""
    error: str = ""
    """Message of the gRPC status of a failed request. May be empty."""
    server_queue_s: float | None = None
    """Seconds that the request waited in the server's queue, by the server's clock."""
    preemptions: int = 0
    """Number of times that the server preempted the request."""

    @property
    def output_tokens(self) -> int:
        """Number of received tokens."""
        return sum(self.chunk_tokens)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first token. None: there is no token."""
        return self.chunk_times[0] - self.start_s if self.start_s is not None and self.chunk_times else None

    @property
    def itl_s(self) -> list[float]:
        """Seconds between each message with tokens and the next message with tokens."""
        return [after - before for before, after in pairwise(self.chunk_times)]

    @property
    def e2el_s(self) -> float | None:
        """Seconds from sending to the last token. None: there is no token."""
        return self.chunk_times[-1] - self.start_s if self.start_s is not None and self.chunk_times else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds for each token after the first. None: there is no second token."""
        if self.output_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def queue_s(self) -> float | None:
        """Seconds from `arrival_s` to sending. None: the request was not sent."""
        return None if self.start_s is None else self.start_s - self.arrival_s


class Load:
    """Run of a benchmark's requests against one server."""

    def __init__(self, client: AsyncClient, model: ModelInfo, config: LoadConfig):
        self._client, self._model, self._config = client, model, config
        self._begin = time.perf_counter()
        self._room = nullcontext() if config.max_concurrency is None else asyncio.Semaphore(config.max_concurrency)
        self.records: list[Record] = []
        """Records of all requests in the order of arrival."""

    def clock(self) -> float:
        """Return the seconds since the start of the run."""
        return time.perf_counter() - self._begin

    async def run(
        self,
        requests: Sequence[PlannedRequest],
        stop: asyncio.Event,
        on_end: Callable[[Record], None] = lambda record: None,
    ) -> float:
        """Send each request at its arrival time, and wait until all requests have ended.

        Return the duration of the run in seconds. Call this method only once.

        Args:
            requests: requests in the order of arrival.
            stop: event that ends the run. Running requests are then cancelled, and no further requests are sent.
            on_end: function that is called with the record of each request that has completed or failed.
        """
        self._begin = time.perf_counter()
        tasks: list[asyncio.Task[None]] = []
        stopped = asyncio.ensure_future(stop.wait())
        try:
            for request in requests:
                delay_s = request.arrival_s - self.clock()
                if delay_s > 0:
                    await asyncio.wait([stopped], timeout=delay_s)
                if stop.is_set():
                    break
                record = Record(request, self.clock())
                self.records.append(record)
                tasks.append(asyncio.create_task(self._follow(record, on_end)))
            if tasks:
                ended = asyncio.ensure_future(asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))
                await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
        finally:
            stopped.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled():
                task.result()  # Raises bugs of this program.
        for record in self.records:
            if record.outcome is Outcome.RUNNING:
                record.outcome, record.end_s = Outcome.INTERRUPTED, self.clock()
        return self.clock()

    async def _follow(self, record: Record, on_end: Callable[[Record], None]) -> None:
        async with self._room:
            try:
                await self._send(record)
                record.outcome = Outcome.COMPLETED if record.outcome is Outcome.RUNNING else record.outcome
            except grpc.aio.AioRpcError as error:
                record.outcome = Outcome.FAILED
                record.status, record.error = error.code().name, error.details() or ""
        record.end_s = self.clock()
        on_end(record)

    async def _send(self, record: Record) -> None:
        request, config = record.request, self._config
        prompt = request.prompt(config.seed, self._model.vocab_size)
        params = SamplingParams(
            temperature=config.temperature,
            max_tokens=request.output_len,
            ignore_eos=config.ignore_eos,
            priority=request.priority,
            ttft_slo_s=request.ttft_slo_s,
            tpot_slo_s=request.tpot_slo_s,
        )
        name = f"{config.request_id_prefix}{request.index}"
        record.start_s = self.clock()
        stream = self._client.stream(prompt, params, request_id=name, cache_salt=config.request_id_prefix)
        async with aclosing(stream):
            async for chunk in stream:
                if chunk.token_ids:
                    record.chunk_times.append(self.clock())
                    record.chunk_tokens.append(len(chunk.token_ids))
                if chunk.usage is not None:
                    record.server_queue_s, record.preemptions = chunk.usage.queue_s, chunk.usage.preemptions
                if chunk.finish_reason == "abort":
                    record.outcome = Outcome.FAILED
                    record.status, record.error = "CANCELLED", "the request was aborted at the server"
