"""Which requests are let in: ids that are taken, and limits."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from amoeba_jax.errors import RequestError
from serving.grpc_server.config import Limits
from serving.grpc_server.statuses import DuplicateIdError, LimitError

MAX_ID_CHARS = 128


class Ticket:
    """A request's place in the queue. It leaves the queue with its first token, or with its end."""

    def __init__(self, admission: "Admission"):
        self._admission = admission
        self._tokens = 0
        self._queued = True

    def count_tokens(self, num_tokens: int) -> None:
        """The prompt's length is known now. Raises `LimitError` if the queue cannot take as many."""
        self._admission.add_tokens(num_tokens)
        self._tokens = num_tokens

    def leave_queue(self) -> None:
        """May be called twice."""
        if self._queued:
            self._queued = False
            self._admission.queued_requests -= 1
            self._admission.queued_tokens -= self._tokens


class Admission:
    """The accepted requests. All methods run in the server's event loop."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._clients: Counter[str] = Counter()
        self.ids: set[str] = set()
        self.queued_requests = 0
        self.queued_tokens = 0

    @contextmanager
    def admit(self, request_id: str, client: str) -> Iterator[Ticket]:
        """Let a request in for as long as the context lasts.

        Raises `RequestError` for an id that is too long, `DuplicateIdError` for one that is taken, `LimitError` where
        a limit is reached.
        """
        if len(request_id) > MAX_ID_CHARS:
            raise RequestError(
                f"the request's id has {len(request_id)} characters: at most {MAX_ID_CHARS} may be given"
            )
        if request_id in self.ids:
            raise DuplicateIdError(f"a request with id {request_id!r} has not ended yet: give another id")
        most = self._limits.max_queued_requests
        if self.queued_requests >= most:
            raise LimitError(f"{most} requests are queued, which is the limit: try again later")
        most = self._limits.max_requests_per_client
        if self._clients[client] >= most:
            raise LimitError(f"this client has {most} requests that have not ended, which is the limit")
        self.ids.add(request_id)
        self._clients[client] += 1
        self.queued_requests += 1
        ticket = Ticket(self)
        try:
            yield ticket
        finally:
            ticket.leave_queue()
            self.ids.discard(request_id)
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]

    def add_tokens(self, num_tokens: int) -> None:
        """Count a prompt's tokens as queued. Raises `LimitError`. A prompt that is alone is never too long here."""
        most = self._limits.max_queued_tokens
        if self.queued_tokens and self.queued_tokens + num_tokens > most:
            raise LimitError(
                f"prompts of {self.queued_tokens} tokens are queued: {num_tokens} more would exceed the limit of "
                f"{most}; try again later"
            )
        self.queued_tokens += num_tokens
