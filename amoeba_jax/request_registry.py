"""Registry of unfinished requests. It also creates requests and submits them to the engine."""

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
from amoeba_jax.prompts import Prompt, check_tokens
from amoeba_jax.request import Delivery, Request
from amoeba_jax.sampling.rows import bad_word_ids, sample_seed, sampling_row
from amoeba_jax.sampling.structured import GrammarCompiler, Matcher
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.shorten import shorten
from amoeba_jax.tokenizer import Tokenizer
from amoeba_jax.valid_text import check_unicode


class RequestRegistry:
    """All unfinished requests by id. Methods may be called from any thread.

    Args:
        engine: engine that runs the requests.
        dispatcher: thread that runs the engine.
        tokenizer: tokenizer. None: the model takes token ids only.
        eos_token_ids: token ids that end a generation.
        seed: seed of the engine. A request without a seed gets a seed derived from this seed.
    """

    def __init__(
        self,
        engine: Engine,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        seed: int,
    ):
        self._engine, self._dispatcher = engine, dispatcher
        self._tokenizer, self._eos_token_ids, self._seed = tokenizer, eos_token_ids, seed
        self._vocab_size = engine.dims.config.vocab_size
        self._grammars: GrammarCompiler | None = None
        self._numbers = itertools.count()
        # Makes generated ids different from ids of callers and of other processes.
        self._id_suffix = secrets.token_hex(4)
        self._requests: dict[str, Request] = {}
        # Reentrant: the garbage collector may call `end` in a thread that holds this lock.
        self._lock = threading.RLock()

    @property
    def ids(self) -> list[str]:
        """Ids of the unfinished requests."""
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
        """Check a prompt and its settings, and return a new request. The request is neither registered nor submitted.

        Args:
            prompt: text or token ids.
            params: sampling settings. None: defaults.
            deliver: function for outputs, called in the output thread (see `Request`).
            request_id: id of the request. None: a generated id.
            cache_salt: name of a group of requests. Cached prefixes are shared only inside a group. None: no name.
            every_token: whether to deliver output after each step. If false, all output is delivered at the end.
            deadline: value of `time.monotonic()` by which the request must start. None: no deadline.
            client: name of the client that sent the request. Clients get equal shares of slots and pages.
            arrival: arrival as a value of `time.monotonic()`. None: now.

        Raises:
            RequestError: the prompt or a setting is invalid, or the request fits no instance.
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
        matcher = self.matcher(params)
        sampling = sampling_row(params, 0, self._vocab_size, self._eos_token_ids, bad_words)
        number, outputs = next(self._numbers), self._dispatcher.outputs

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
                    matcher=None if matcher is None else matcher.copy(),
                    arrival=arrival,
                )
            )
        sequences[0].siblings = sequences[1:]
        request = Request(text, sequences, self._tokenizer, deliver, every_token)
        return request

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """Return the initial state of the grammar that constrains a sequence, or None without a constraint.

        A new grammar is compiled, which can take some seconds. For a known grammar, the call takes microseconds. Raises
        `RequestError` if the grammar is refused.
        """
        if params.structured is None:
            return None
        return self.grammars().compile(params.structured)

    def grammars(self) -> GrammarCompiler:
        """Return the compiler of grammars. Raises `RequestError` if the model has no tokenizer."""
        tokenizer = self.need_tokenizer("structured output")
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(tokenizer, self._vocab_size, self._eos_token_ids)
            return self._grammars

    def load_grammars(self) -> None:
        """Load the vocabulary that constrained decoding needs, if there is a tokenizer.

        Without this call, the first constrained request loads the vocabulary and blocks all threads for up to 1 s.
        """
        if self._tokenizer is not None:
            self.grammars().load_vocabulary()

    def register(self, request: Request) -> None:
        """Register a request by its id. Raises `RequestError` if another unfinished request has this id."""
        with self._lock:
            if request.id in self._requests:
                raise RequestError(f"request_id {shorten(request.id)} is taken by an unfinished request")
            self._requests[request.id] = request

    def submit_soon(self, requests: list[Request]) -> "Future[None]":
        """Submit requests to the engine before its next step.

        The returned future is done when the engine has queued the requests.
        """
        # One call for all: with several, steps of random batch sizes would run (and compile) in between.
        return self._dispatcher.call(self._engine.submit, [request.sequences[0] for request in requests])

    def submit(self, requests: list[Request]) -> None:
        """Submit requests and wait until the engine has queued them."""
        self.submit_soon(requests).result()

    def cancel(self, request_id: str) -> bool:
        """Abort a request. Return False if no unfinished request has this id (`LLM.cancel`)."""
        with self._lock:
            request = self._requests.get(request_id)
        if request is None:
            return False
        self._dispatcher.call(self._engine.sequences.finish, request.sequences, "abort").result()
        return True

    def end(self, requests: list[Request]) -> None:
        """Remove requests and abort their unfinished sequences."""
        with self._lock:
            for request in requests:
                if self._requests.get(request.id) is request:  # the id may be another request's now
                    del self._requests[request.id]
        unfinished = [s for request in requests for s in request.sequences if not s.finished]
        if unfinished:
            # Do not wait: the garbage collector may run this in any thread, even in the dispatcher. Calls run in order,
            # so the next call sees the pages free.
            with contextlib.suppress(EngineClosedError):
                self._dispatcher.call(self._engine.sequences.finish, unfinished, "abort")

    def need_tokenizer(self, what: str) -> Tokenizer:
        """Return the tokenizer. If the model has none, raise a `RequestError` that names the feature `what`."""
        if self._tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and the model has no tokenizer.json: give token ids")
        return self._tokenizer
