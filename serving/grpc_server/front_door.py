"""A request's way from a protocol's service to the engine and back."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from amoeba_jax.errors import DeadlineError, EngineClosedError, NotANumberError, RequestError
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.tokenizer import Tokenizer
from serving.grpc_server.admission import Admission, Ticket
from serving.grpc_server.backend import Backend
from serving.grpc_server.config import Limits
from serving.grpc_server.latest_output import LatestOutput, Send
from serving.grpc_server.statuses import NotServingError, UnknownModelError
from serving.metrics import RequestRecord, ServerMetrics
from serving.scheduling import Scheduling

if TYPE_CHECKING:
    from serving.tracing import Tracing

# How long a drain waits for the clients of requests that it has aborted.
_LAST_WORDS_S = 2.0
# How long the message that is being written may take when its request is over.
_LAST_WRITE_S = 0.5

T = TypeVar("T")
Prompt = str | list[int] | list[dict[str, Any]]
"""A text, token ids, or a conversation."""


class State(Enum):
    """What the server can do now. The value is said to clients whose requests are refused."""

    LOADING = "the server is loading its model: try again later"
    READY = "ready"
    DRAINING = "the server is shutting down: try another"
    DEAD = "the engine has failed: try another server"


@dataclass(frozen=True)
class Call:
    """A request as every protocol puts it.

    Attributes:
        client: whom it is counted for.
        timeout_s: how long it may take from now on; None: for ever.
        trace_headers: `traceparent` and `tracestate` of W3C Trace Context, as far as the client sent them.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    client: str
    timeout_s: float | None = None
    cache_salt: str | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)


class FrontDoor:
    """Lets requests in and serves them. All methods run in the server's event loop."""

    def __init__(self, limits: Limits, metrics: ServerMetrics, tracing: "Tracing | None" = None):
        self.state = State.LOADING
        self.admission = Admission(limits)
        self.metrics = metrics
        self._tracing = tracing
        self._limits = limits
        self._backend: Backend | None = None
        self.scheduling: Scheduling | None = None
        # Tokenizing long texts takes a while, and so do calls that wait for the engine: the loop must go on meanwhile.
        self._tokenizing = ThreadPoolExecutor(2, thread_name_prefix="amoeba-tokenize")
        self._control = ThreadPoolExecutor(8, thread_name_prefix="amoeba-control")
        self._generating: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, backend: Backend, scheduling: Scheduling | None) -> None:
        """The model is loaded: serve. Without `scheduling`, instances change only when they are told to."""
        self._backend, self.scheduling = backend, scheduling
        self.state = State.READY

    def fail(self) -> None:
        """The engine has failed, or does not answer any more: requests end with `NotServingError`."""
        self.state = State.DEAD
        for task in self._generating:
            task.cancel()

    def close(self) -> None:
        """Let the threads go."""
        for pool in (self._tokenizing, self._control):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def backend(self) -> Backend:
        """What serves. Raises `NotServingError` while it is loading, or has failed."""
        if self._backend is None or self.state is State.DEAD:
            raise NotServingError(self.state.value)
        return self._backend

    def check_model(self, name: str) -> None:
        """Raises `UnknownModelError` if a call names another model than the one served; "" names it too."""
        if name and name != self.backend.name:
            raise UnknownModelError(f"model {name[:100]!r} is not served here: this server has {self.backend.name!r}")

    def tokenizer(self) -> Tokenizer:
        """Raises `RequestError` if the model has none."""
        if self.backend.tokenizer is None:
            raise RequestError("the model has no tokenizer: send token ids")
        return self.backend.tokenizer

    async def serve(self, call: Call, send: Send) -> None:
        """Generate for a request, sending outputs as they come. Its pages are free when this returns or raises.

        Raises what `statuses` maps. Cancelling the task ends the request.
        """
        backend = self.backend
        if self.state is not State.READY:
            raise NotServingError(self.state.value)
        record, started_ns = self.metrics.start_request(), time.time_ns()
        failure: BaseException | None = None
        try:
            with self.admission.admit(call.request_id, call.client) as ticket:
                self._idle.clear()
                await self._serve_in_time(backend, call, send, ticket, record)
        except BaseException as error:
            failure = error
            raise
        finally:
            record.end(failed=isinstance(failure, NotANumberError | NotServingError | EngineClosedError))
            if self._tracing is not None:
                self._tracing.request(call, backend.name, started_ns, record.output, failure)
            if not self.admission.ids:
                self._idle.set()

    async def _serve_in_time(
        self, backend: Backend, call: Call, send: Send, ticket: Ticket, record: RequestRecord
    ) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(call.timeout_s):
                tokens = await self.tokenize(call.prompt)
                ticket.count_tokens(len(tokens))
                deadline = None if call.timeout_s is None else started + call.timeout_s
                await self._generate(backend, call, tokens, deadline, send, ticket, record)
        except TimeoutError:
            waited_s = time.monotonic() - started
            raise DeadlineError(f"the request's time is over after {waited_s:.3f} s") from None

    async def _generate(
        self,
        backend: Backend,
        call: Call,
        tokens: list[int],
        deadline: float | None,
        send: Send,
        ticket: Ticket,
        record: RequestRecord,
    ) -> None:
        """The engine is read as fast as it generates, whatever the client does: two tasks, which end together."""
        if self.state is State.DEAD:  # since its prompt was tokenized
            raise NotServingError(self.state.value)
        buffer = LatestOutput(self._limits.max_buffered_tokens)

        async def receive() -> None:
            stream = backend.astream(
                tokens,
                call.params,
                request_id=call.request_id,
                cache_salt=call.cache_salt or None,
                deadline=deadline,
            )
            async with contextlib.aclosing(stream):
                async for output in stream:
                    ticket.leave_queue()
                    record.take(output)
                    buffer.put(output)

        tasks = [asyncio.ensure_future(receive()), asyncio.ensure_future(buffer.send_all(send))]
        self._generating.update(tasks)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.cancelled() for task in done):
                raise NotServingError(self.state.value)
            for task in done:
                task.result()
        finally:
            self._generating.difference_update(tasks)
            # gRPC takes no status while a message is being written. A client that does not read is not waited for.
            buffer.close()
            await asyncio.wait(tasks[1:], timeout=_LAST_WRITE_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt. Raises `RequestError` for one that has none."""
        if isinstance(prompt, str):
            tokens = await self._run(self._tokenizing, self.tokenizer().encode, prompt, add_special_tokens)
        elif prompt and isinstance(prompt[0], dict):
            tokens = await self._run(self._tokenizing, self.tokenizer().apply_chat_template, prompt)
        else:
            tokens = list(cast(list[int], prompt))
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token")
        return tokens

    async def control(self, function: Callable[..., T], *args: Any) -> T:
        """Run what waits for the engine, such as a transformation, outside the loop."""
        return await self._run(self._control, function, *args)

    async def _run(self, pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *args)

    async def abort(self, request_id: str) -> bool:
        """End a request; its client gets what was generated, with finish reason `abort`. Whether there was one."""
        return await self.control(self.backend.cancel, request_id)

    async def drain(self, timeout_s: float | None) -> int:
        """Take no new requests, wait for those that run (None: for ever), then abort. Returns how many were aborted."""
        if self.state in (State.LOADING, State.READY):
            self.state = State.DRAINING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        left = sorted(self.admission.ids)
        for request_id in left:
            with contextlib.suppress(NotServingError, EngineClosedError):  # it failed meanwhile: they have ended
                await self.abort(request_id)
        # A client that does not read cannot be told.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._idle.wait()
        return len(left)
