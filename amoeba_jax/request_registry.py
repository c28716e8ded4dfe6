"""The requests of all threads: checked, known by their ids, given to the engine and ended."""

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from amoeba_jax.engine.dispatcher import Dispatcher
from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import EngineClosedError, RequestError
from amoeba_jax.instances.sequence import Sequence, Update
from amoeba_jax.output_thread import OutputThread
from amoeba_jax.prompts import Prompt, check_tokens
from amoeba_jax.request import Delivery, Request
from amoeba_jax.sampling.rows import bad_word_ids, sample_seed, sampling_row
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.shorten import shorten
from amoeba_jax.tokenizer import Tokenizer
from amoeba_jax.valid_text import check_unicode


class RequestRegistry:
    """Requests from their prompt to their end. Methods may be called from any thread.

    Args:
        tokenizer: None for a model that takes token ids only.
        eos_token_ids: that end a generation.
        seed: from which the seeds of requests derive that set none.
    """

    def __init__(
        self,
        engine: Engine,
        dispatcher: Dispatcher,
        outputs: OutputThread,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        seed: int,
    ):
        self._engine, self._dispatcher, self._outputs = engine, dispatcher, outputs
        self._tokenizer, self._eos_token_ids, self._seed = tokenizer, eos_token_ids, seed
        self._vocab_size = engine.dims.config.vocab_size
        self._numbers = itertools.count()
        # Makes the numbers different from ids that callers may choose, and from those of other processes.
        self._id_suffix = secrets.token_hex(4)
        self._requests: dict[str, Request] = {}
        # Reentrant: the garbage collector may end an abandoned stream in a thread that is in here.
        self._lock = threading.RLock()

    @property
    def ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        with self._lock:
            return list(self._requests)

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        deliver: Callable[[Delivery], None],
        request_id: str | None,
        cache_salt: str | None,
        every_token: bool = True,
        deadline: float | None = None,
        client: str = "",
        arrival: float | None = None,
    ) -> Request:
        """A request whose prompt and settings are checked, to be registered, submitted and ended by the caller.

        Changes nothing. Raises `RequestError` for what cannot be served.

        Args:
            deliver: called in the thread of all outputs; see `Request`.
            every_token: whether `deliver` gets what each step brings, or everything at the end.
            deadline: time of `time.monotonic()` until which the request may wait for an instance.
            client: name whose share of slots and pages the request counts against.
            arrival: time of `time.monotonic()` when it came; None: now.
        """
        arrival = time.monotonic() if arrival is None else arrival
        params = params or SamplingParams()
        for name, given in (("request_id", request_id), ("cache_salt", cache_salt)):
            check_unicode(given or "", name)
        text = prompt if isinstance(prompt, str) else None
        token_ids = prompt if text is None else self.need_tokenizer("a text prompt").encode(text)
        tokens = check_tokens(token_ids, self._vocab_size)
        self._engine.check_request(len(tokens), params.max_tokens)
        params.check_vocabulary(self._vocab_size)
        bad_words = bad_word_ids(params.bad_words, self.need_tokenizer("bad_words")) if params.bad_words else ()
        if params.stop:
            self.need_tokenizer("stop")
        sampling = sampling_row(params, 0, self._vocab_size, self._eos_token_ids, bad_words)
        number, outputs = next(self._numbers), self._outputs

        def sink(update: Update) -> None:
            outputs.put(request, update)

        sequences: list[Sequence] = []
        for index in range(params.n):
            if params.seed is None:
                seed = sample_seed(self._seed, number, index)
            else:
                seed = (params.seed + index) % 2**32
            sequences.append(
                Sequence(
                    request_id if request_id is not None else f"{number}-{self._id_suffix}",
                    tokens,
                    params,
                    sampling.with_seed(seed),
                    sink,
                    index=index,
                    eos_token_ids=self._eos_token_ids,
                    cache_salt=cache_salt,
                    leader=sequences[0] if sequences else None,
                    deadline=deadline,
                    client=client,
                    arrival=arrival,
                )
            )
        sequences[0].siblings = sequences[1:]
        request = Request(text, sequences, self._tokenizer, deliver, every_token)
        return request

    def register(self, request: Request) -> None:
        """Make a request known by its id. Raises `RequestError` if another one has it."""
        with self._lock:
            if request.id in self._requests:
                raise RequestError(f"request_id {shorten(request.id)} is taken by a request that is not finished yet")
            self._requests[request.id] = request

    def submit_soon(self, requests: list[Request]) -> "Future[None]":
        """Give requests to the engine, all between the same two steps; done once it has them."""
        # All in one call: steps would run between several, with batches of chance sizes (and compile those).
        return self._dispatcher.call(self._engine.submit, [request.sequences[0] for request in requests])

    def submit(self, requests: list[Request]) -> None:
        """`submit_soon`, and wait until the engine has them."""
        self.submit_soon(requests).result()

    def cancel(self, request_id: str) -> bool:
        """See `LLM.cancel`."""
        with self._lock:
            request = self._requests.get(request_id)
        if request is None:
            return False
        self._dispatcher.call(self._engine.finish, request.sequences, "abort").result()
        return True

    def end(self, requests: list[Request]) -> None:
        """Forget requests; what has not finished is aborted."""
        with self._lock:
            for request in requests:
                if self._requests.get(request.id) is request:  # the id may be another request's now
                    del self._requests[request.id]
        unfinished = [s for request in requests for s in request.sequences if not s.finished]
        if unfinished:
            # Not waited for: the garbage collector may run this in any thread, the dispatcher's own included. Calls
            # are served in order, so whatever is asked next sees the pages free.
            with contextlib.suppress(EngineClosedError):
                self._dispatcher.call(self._engine.finish, unfinished, "abort")

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The model's tokenizer. Raises `RequestError` if it has none, naming what needs it."""
        if self._tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and the model has no tokenizer.json: give token ids")
        return self._tokenizer
