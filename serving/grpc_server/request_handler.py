"""A request's way from a protocol's service to the engine and back."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from amoeba_jax.errors import (
    DeadlineError,
    EngineClosedError,
    LayoutError,
    RequestError,
    TransformError,
)
from amoeba_jax.tokenizer import Tokenizer
from serving.grpc_server.callers import Caller, Callers
from serving.grpc_server.calls import Call, Prompt
from serving.grpc_server.config import Limits
from serving.grpc_server.field_limits import check_length, check_prompt_entries, check_prompt_text
from serving.grpc_server.open_requests import OpenRequests, Ticket
from serving.grpc_server.output_coalescer import OutputCoalescer, Send
from serving.grpc_server.refusals import Refusals
from serving.grpc_server.statuses import LimitError, NotServingError, UnknownModelError, reason_of
from serving.grpc_server.threads import MAX_TRANSFORM_CALLS, Threads
from serving.runtime.backend import Backend
from serving.runtime.metrics import RequestRecord, ServerMetrics
from serving.runtime.scheduling import Scheduling

if TYPE_CHECKING:
    from serving.grpc_server.tracing import Tracing

# How long a drain waits for the clients of requests that it has aborted, and for the engine to abort them.
_SHUTDOWN_GRACE_S = 2.0
_ABORT_S = 10.0
# How long the message that is being written may take when its request is over.
_LAST_WRITE_S = 0.5

logger = logging.getLogger(__name__)

T = TypeVar("T")


class State(Enum):
    """What the server can do now. The value is said to clients whose requests are refused."""

    LOADING = "the server is loading its model: try again later"
    READY = "ready"
    DRAINING = "the server is shutting down: try another"
    DEAD = "the engine has failed: try another server"


class RequestHandler:
    """Lets requests in and serves them. All methods run in the server's event loop."""

    def __init__(
        self,
        limits: Limits,
        metrics: ServerMetrics,
        tracing: "Tracing | None" = None,
        callers: Callers | None = None,
    ):
        self.state = State.LOADING
        self.admission = OpenRequests(limits)
        self.refusals = Refusals(limits)
        self.callers = callers or Callers()
        self.limits = limits
        self.metrics = metrics
        self._tracing = tracing
        self._backend: Backend | None = None
        self.scheduling: Scheduling | None = None
        self._threads = Threads()
        self._num_transforming = 0
        self.on_draining: Callable[[], None] | None = None
        self._aborts = False  # a drain has begun to
        # Of each request, by its id: the task that reads the engine, and the one that writes.
        self._generating: dict[str, tuple[asyncio.Task[None], asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, backend: Backend, scheduling: Scheduling | None) -> None:
        """The model is loaded: serve, unless a drain has begun. Without `scheduling`, instances change only when they
        are told to."""
        self._backend, self.scheduling = backend, scheduling
        if self.state is State.LOADING:
            self.state = State.READY

    def fail(self) -> None:
        """The engine has failed, or does not answer any more: requests end with `NotServingError`."""
        self.state = State.DEAD
        for task in itertools.chain.from_iterable(self._generating.values()):
            task.cancel()

    def close(self) -> None:
        """Let the threads go."""
        self._threads.close()

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
        """Generate for a request, sending what is new as it comes. Its pages are free when this returns or raises.

        Raises what `statuses` maps. Cancelling the task ends the request.
        """
        backend = self.backend
        if self.state is not State.READY:
            raise NotServingError(self.state.value)
        record, started_ns, arrival = self.metrics.start_request(), time.time_ns(), time.monotonic()
        failure: BaseException | None = None
        try:
            with self.admission.admit(call.caller, call.num_bytes, call.name, call.unique_name, call.params) as ticket:
                self._idle.clear()
                async with _time_limit(call.timeout_s) as deadline:
                    await self.refusals.before_request(call.caller.account)
                    tokens = await self.tokenize(call.prompt)
                    check_prompt_entries(len(tokens), call.params, self.limits)
                    ticket.count_tokens(len(tokens))
                    await self._generate(call, tokens, arrival, deadline, send, ticket, record)
        except BaseException as error:
            failure = error
            if isinstance(error, asyncio.CancelledError | DeadlineError):
                self.refusals.given_up(call.caller.account, time.monotonic() - arrival)
            raise
        finally:
            record.end(None if failure is None else reason_of(failure))
            if self._tracing is not None:
                self._tracing.request(call, backend.name, started_ns, record, failure)
            self._check_idle()

    async def _generate(
        self,
        call: Call,
        tokens: list[int],
        arrival: float,
        deadline: float | None,
        send: Send,
        ticket: Ticket,
        record: RequestRecord,
    ) -> None:
        """The engine is read as fast as it generates, whatever the client does: two tasks, which end together."""
        if self._aborts or self.state is State.DEAD:  # since its prompt was tokenized
            raise NotServingError(self.state.value)
        buffer = OutputCoalescer(self.limits.max_buffered_tokens, call.params)

        async def receive() -> None:
            stream = self.backend.astream_deltas(
                tokens,
                call.params,
                request_id=ticket.id,
                cache_salt=call.salt,
                deadline=deadline,
                client=call.caller.account,
                arrival=arrival,
            )
            async with contextlib.aclosing(stream):
                async for _, delta in stream:
                    if delta.completions:  # there is a token
                        ticket.leave_queue()
                        record.take(delta)
                    buffer.put(delta)

        receiving, sending = asyncio.ensure_future(receive()), asyncio.ensure_future(buffer.send_all(send))
        self._generating[ticket.id] = receiving, sending
        try:
            done, _ = await asyncio.wait((receiving, sending), return_when=asyncio.FIRST_EXCEPTION)
            if any(task.cancelled() for task in done):
                raise NotServingError(self.state.value)
            for task in done:
                task.result()
        finally:
            # The engine's part ends before anything is awaited here: a second cancellation (gRPC sends one at a
            # deadline, and the time limit above another) may come at any await, and must not leave it running.
            receiving.cancel()
            buffer.close()
            del self._generating[ticket.id]
            closing = asyncio.ensure_future(_end_both(receiving, sending))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)

    async def tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt. Raises `RequestError` for one that has none, or is too long to have a place."""
        if isinstance(prompt, str):
            self._check_text(len(prompt))
            encode = partial(self.tokenizer().encode, prompt, add_special_tokens)
            tokens = await self._threads.tokenize(len(prompt), encode)
        elif prompt and isinstance(prompt[0], dict):
            messages = cast(list[dict[str, Any]], prompt)
            check_length("the conversation", len(messages), "max_chat_messages", self.limits, "messages")
            length = sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
            self._check_text(length)
            tokens = await self._threads.tokenize(length, partial(self.tokenizer().apply_chat_template, messages))
        else:
            tokens = cast(list[int], prompt)
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token")
        return tokens

    async def detokenize(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """The text of token ids. Raises `RequestError` for more than a context has."""
        self.check_num_tokens("token_ids", len(token_ids))
        decode = partial(self.tokenizer().decode, token_ids, skip_special_tokens)
        return await self._threads.tokenize(len(token_ids), decode)

    def check_num_tokens(self, name: str, num_tokens: int) -> None:
        """Raise `RequestError` for more tokens than the longest context has."""
        if num_tokens > (limit := self.backend.max_model_len):
            raise RequestError(f"{name} has {num_tokens} tokens: at most {limit} may be given (max_model_len)")

    def _check_text(self, length: int) -> None:
        backend, tokenizer = self.backend, self.tokenizer()
        check_prompt_text(length, self.limits, backend.max_model_len, tokenizer.longest_token_chars)

    @contextlib.asynccontextmanager
    async def admitted(self, caller: Caller, num_bytes: int, timeout_s: float | None):
        """For calls that tokenize and generate nothing: they count as requests, and have the same deadlines.

        Raises `NotServingError` unless the server is ready, and what `OpenRequests.admit` raises.
        """
        if self.state is not State.READY:
            raise NotServingError(self.state.value)
        try:
            with self.admission.admit(caller, num_bytes):
                self._idle.clear()
                async with _time_limit(timeout_s):
                    yield
        finally:
            self._check_idle()

    def _check_idle(self) -> None:
        if not self.admission.ids:
            self._idle.set()

    async def control(self, function: Callable[..., T], *args: Any) -> T:
        """Ask the engine something, outside the loop."""
        return await self._threads.run(self._threads.control, function, *args)

    async def transform(self, function: Callable[[], T]) -> T:
        """Run a transformation to its end, outside the loop. Raises `LimitError` where many are waited for."""
        if self._num_transforming >= MAX_TRANSFORM_CALLS:
            raise LimitError(f"{MAX_TRANSFORM_CALLS} transformations are waited for, which is the limit")
        self._num_transforming += 1
        try:
            return await self._threads.run(self._threads.transforming, function)
        finally:
            self._num_transforming -= 1

    async def abort(self, caller: Caller, name: str) -> bool:
        """End requests by their name; clients get what was generated, with finish reason `abort`. Whether there was
        one. See `OpenRequests.find`."""
        found = self.admission.find(caller, name)
        return any([await self._abort(request_id) for request_id in found])

    async def _abort(self, request_id: str) -> bool:
        return await self._threads.run(self._threads.aborting, self.backend.cancel, request_id)

    async def drain(self, timeout_s: float | None) -> int:
        """Take no new requests, wait for those that run (None: for ever), then abort. Returns how many were aborted."""
        if self.state is State.READY:
            # Beside this: whether or not it succeeds, those that have not ended in time are aborted.
            self._threads.run(self._threads.transforming, resume_paused, self.backend)
        if self.state in (State.LOADING, State.READY):
            self.state = State.DRAINING
        if self.on_draining is not None:
            self.on_draining()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        self._aborts = True
        left = sorted(self.admission.ids)
        # An engine that does not answer is not waited for.
        with contextlib.suppress(TimeoutError, NotServingError, EngineClosedError):
            async with asyncio.timeout(_ABORT_S):
                for request_id in left:
                    # One that the engine does not have yet is not to come to it.
                    if not await self._abort(request_id):
                        for task in self._generating.get(request_id, ()):
                            task.cancel()
        # A client that does not read cannot be told.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHUTDOWN_GRACE_S):
                await self._idle.wait()
        return len(left)


def resume_paused(backend: Backend) -> None:
    """Let paused requests go on. Does not raise: what cannot is logged, and stays paused."""
    try:
        for view in backend.instances:
            if view.paused:
                backend.transform(view.paused_degree, list(view.devices))
    except (RequestError, LayoutError, TransformError, EngineClosedError) as error:
        logger.warning("paused requests do not go on: %s", error)


@contextlib.asynccontextmanager
async def _time_limit(timeout_s: float | None):
    """Raise `DeadlineError` in what takes longer. Gives the deadline by `time.monotonic()`, None for no limit."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            yield None if timeout_s is None else started + timeout_s
    except TimeoutError:
        raise DeadlineError(f"deadline exceeded after {time.monotonic() - started:.3f} s") from None


async def _end_both(receiving: "asyncio.Task[None]", sending: "asyncio.Task[None]") -> None:
    """Wait for both tasks of a request, the first of which is cancelled already."""
    # gRPC takes no status while a message is being written. A client that does not read is not waited for.
    await asyncio.wait((sending,), timeout=_LAST_WRITE_S)
    sending.cancel()
    await asyncio.gather(receiving, sending, return_exceptions=True)
