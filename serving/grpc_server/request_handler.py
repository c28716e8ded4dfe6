"""Handling of requests between the services of the protocols and the engine."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from amoeba_jax.errors import (
    ContextLengthError,
    DeadlineError,
    EngineClosedError,
    LayoutError,
    RequestError,
    TransformError,
)
from amoeba_jax.tokenizer import Tokenizer
from serving.grpc_server.callers import Caller, Callers
from serving.grpc_server.calls import Call, Chat, Prompt
from serving.grpc_server.config import Limits
from serving.grpc_server.field_limits import check_length, check_prompt_entries, check_prompt_text, num_chars
from serving.grpc_server.open_requests import OpenRequests, Ticket
from serving.grpc_server.output_coalescer import OutputCoalescer, Send
from serving.grpc_server.refusals import Refusals
from serving.grpc_server.statuses import LimitError, NotServingError, UnknownModelError, reason_of
from serving.grpc_server.threads import MAX_TRANSFORM_CALLS, Threads
from serving.runtime.metrics import RequestRecord, ServerMetrics
from serving.runtime.scheduling import Scheduling

if TYPE_CHECKING:
    from amoeba_jax import LLM
    from serving.grpc_server.tracing import Tracing

# Seconds that a drain waits for clients of aborted requests, and for the engine to abort requests.
_SHUTDOWN_GRACE_S = 2.0
_ABORT_S = 10.0
# Seconds that a started write may take after its request has ended.
_LAST_WRITE_S = 0.5

logger = logging.getLogger(__name__)

T = TypeVar("T")


class State(Enum):
    """State of the server. The value of a member is the error message for requests that arrive in this state."""

    LOADING = "the server is loading its model: try again later"
    READY = "ready"
    DRAINING = "the server is shutting down: try another server"
    DEAD = "the engine has failed: try another server"


class RequestHandler:
    """Handler for the requests of all protocols, from admission to the last message.

    All methods run in the event loop of the server.
    """

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
        self._backend: LLM | None = None
        self.scheduling: Scheduling | None = None
        self._threads = Threads()
        self._num_transforming = 0
        self.on_draining: Callable[[], None] | None = None
        self._aborts = False  # whether a drain has started to abort requests
        # By request id: the task that reads the engine, and the task that writes to the client.
        self._generating: dict[str, tuple[asyncio.Task[None], asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, backend: "LLM", scheduling: Scheduling | None) -> None:
        """Start to serve with a loaded model. If a drain has started, the handler still refuses new requests.

        Args:
            backend: loaded model.
            scheduling: scheduler of the model. None: instances change only by calls of `transform`.
        """
        self._backend, self.scheduling = backend, scheduling
        if self.state is State.LOADING:
            self.state = State.READY

    def fail(self) -> None:
        """End all requests with `NotServingError`, because the engine has failed or is stuck."""
        self.state = State.DEAD
        for task in itertools.chain.from_iterable(self._generating.values()):
            task.cancel()

    def close(self) -> None:
        """Stop the threads of the handler."""
        self._threads.close()

    @property
    def backend(self) -> "LLM":
        """Loaded model. Raises `NotServingError` if the model is still loading, or if the engine has failed."""
        if self._backend is None or self.state is State.DEAD:
            raise NotServingError(self.state.value)
        return self._backend

    def check_model(self, name: str) -> None:
        """Raise `UnknownModelError` if `name` is not the name of the served model. An empty name is accepted."""
        if name and name != self.backend.name:
            raise UnknownModelError(f"model {name[:100]!r} is not served here: this server has {self.backend.name!r}")

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the model. Raises `RequestError` if the model has no tokenizer."""
        if self.backend.tokenizer is None:
            raise RequestError("the model has no tokenizer: send token ids")
        return self.backend.tokenizer

    async def serve(self, call: Call, send: Send) -> None:
        """Serve a request, and pass its output to `send` as it is generated.

        When this method ends, the KV cache of the request is free. If the task is cancelled, the request is aborted.
        `statuses.py` lists the exceptions.
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
                    tokens = await self.tokenize(call.prompt, call.add_special_tokens)
                    if call.with_tokens is not None:
                        call = replace(call, params=call.with_tokens(tokens))
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
        """Receive output from the engine in one task, and write it to the client in another task.

        A slow client therefore does not delay the engine.
        """
        if self._aborts or self.state is State.DEAD:  # may have changed during tokenization
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
                    if delta.completions:  # has a token
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
            # Cancel the engine's task before the first await: a second cancellation may arrive at any await (gRPC and
            # the time limit each send one) and must not leave the task running.
            receiving.cancel()
            buffer.close()
            del self._generating[ticket.id]
            closing = asyncio.ensure_future(_end_both(receiving, sending))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)

    async def tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt. Raises `RequestError` for a prompt that is empty or too long."""
        if isinstance(prompt, str):
            self._check_text(len(prompt))
            encode = partial(self.tokenizer().encode, prompt, add_special_tokens)
            tokens = await self._threads.tokenize(len(prompt), encode)
        elif isinstance(prompt, Chat):
            messages, tools = prompt.messages, prompt.tools
            check_length("the conversation", len(messages), "max_chat_messages", self.limits, "messages")
            length = num_chars([messages, tools, prompt.settings])
            check_length("the conversation", length, "max_prompt_chars", self.limits, "characters")
            tokens = await self._threads.tokenize(length, partial(self._encode_chat, prompt))
        else:
            tokens = prompt
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token")
        return tokens

    async def detokenize(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids. Raises `RequestError` for more tokens than fit the context."""
        self.check_num_tokens("token_ids", len(token_ids))
        decode = partial(self.tokenizer().decode, token_ids, skip_special_tokens)
        return await self._threads.tokenize(len(token_ids), decode)

    def check_num_tokens(self, name: str, num_tokens: int) -> None:
        """Raise `RequestError` if the field `name` has more tokens than fit the context of the model."""
        if num_tokens > (limit := self.backend.max_model_len):
            raise ContextLengthError(f"{name} has {num_tokens} tokens: at most {limit} may be given (max_model_len)")

    def _encode_chat(self, chat: Chat) -> list[int]:
        tokenizer = self.tokenizer()
        text = tokenizer.render_chat(chat.messages, tools=chat.tools, **chat.settings)
        self._check_text(len(text))  # templates may repeat their arguments
        return tokenizer.encode(text, add_special_tokens=False)

    def _check_text(self, length: int) -> None:
        backend, tokenizer = self.backend, self.tokenizer()
        check_prompt_text(length, self.limits, backend.max_model_len, tokenizer.longest_token_chars)

    @contextlib.asynccontextmanager
    async def admitted(self, caller: Caller, num_bytes: int, timeout_s: float | None):
        """Admit a call that only tokenizes or detokenizes.

        The call counts as a request of the caller until the `with` block ends. A `timeout_s` of None means no limit.

        Raises:
            DeadlineError: the `with` block took more than `timeout_s` seconds.
            NotServingError: the server is not ready.
            LimitError: a limit is reached (see `OpenRequests.admit`).
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
        """Call a function of the engine in a thread, so that the event loop does not wait. Return its result."""
        return await self._threads.run(self._threads.control, function, *args)

    async def transform(self, function: Callable[[], T]) -> T:
        """Run a transformation (merge or split of instances) in a thread. Return its result.

        Raises `LimitError` if `MAX_TRANSFORM_CALLS` transformations already run or wait.
        """
        if self._num_transforming >= MAX_TRANSFORM_CALLS:
            raise LimitError(
                f"{MAX_TRANSFORM_CALLS} calls already wait for transformations, which is the limit: try again later"
            )
        self._num_transforming += 1
        try:
            return await self._threads.run(self._threads.transforming, function)
        finally:
            self._num_transforming -= 1

    async def abort(self, caller: Caller, name: str) -> bool:
        """Abort the requests that `OpenRequests.find` finds for a name. Return whether there was a request to abort.

        The client of an aborted request gets the output so far, with the finish reason `abort`.
        """
        found = self.admission.find(caller, name)
        return any([await self._abort(request_id) for request_id in found])

    async def _abort(self, request_id: str) -> bool:
        return await self._threads.run(self._threads.aborting, self.backend.cancel, request_id)

    async def drain(self, timeout_s: float | None) -> int:
        """Refuse new requests, and wait until all running requests end. Return the number of aborted requests.

        Args:
            timeout_s: seconds after which requests that still run are aborted. None: no request is aborted.
        """
        if self.state is State.READY:
            # In parallel: even if it fails, requests that have not ended in time are aborted.
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
        # Do not wait for an engine that does not answer.
        with contextlib.suppress(TimeoutError, NotServingError, EngineClosedError):
            async with asyncio.timeout(_ABORT_S):
                for request_id in left:
                    # The engine does not have this request yet: do not submit it.
                    if not await self._abort(request_id):
                        for task in self._generating.get(request_id, ()):
                            task.cancel()
        # Do not wait for clients that do not read.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHUTDOWN_GRACE_S):
                await self._idle.wait()
        return len(left)


def resume_paused(backend: "LLM") -> None:
    """Resume requests that a merge of instances has paused. On failure, log a warning and leave the requests paused."""
    try:
        for view in backend.instances:
            if view.paused:
                backend.transform(view.paused_degree, list(view.devices))
    except (RequestError, LayoutError, TransformError, EngineClosedError) as error:
        logger.warning("paused requests could not be resumed: %s", error)


@contextlib.asynccontextmanager
async def _time_limit(timeout_s: float | None):
    """Raise `DeadlineError` if the `with` block takes more than `timeout_s` seconds.

    Yield the deadline (`time.monotonic()`), or None if there is no limit.
    """
    started = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            yield None if timeout_s is None else started + timeout_s
    except TimeoutError:
        raise DeadlineError(f"deadline exceeded after {time.monotonic() - started:.3f} s") from None


async def _end_both(receiving: "asyncio.Task[None]", sending: "asyncio.Task[None]") -> None:
    """Wait for the two tasks of a request.

    The caller has already cancelled `receiving`. If `sending` does not end within a short time, cancel it.
    """
    # gRPC accepts no status during a write, so give the write a short time to end.
    await asyncio.wait((sending,), timeout=_LAST_WRITE_S)
    sending.cancel()
    await asyncio.gather(receiving, sending, return_exceptions=True)
