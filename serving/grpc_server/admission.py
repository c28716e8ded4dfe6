"""Which requests are let in: names that are taken, and limits."""

import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from amoeba_jax.shorten import shorten
from serving.grpc_server.callers import Caller
from serving.grpc_server.config import Limits
from serving.grpc_server.statuses import DuplicateIdError, LimitError


class Ticket:
    """A request's place in the queue. It leaves the queue with its first token, or with its end.

    Attributes:
        id: the request's within this server; no client can choose it.
    """

    def __init__(self, admission: "Admission"):
        self.id = uuid.uuid4().hex
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
    """The accepted requests. All methods run in the server's event loop.

    Attributes:
        ids: of all of them, within this server.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._requests_of: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        self._named: dict[tuple[str, str], str] = {}  # id by scope and name
        self.ids: set[str] = set()
        self.queued_requests = 0
        self.queued_tokens = 0

    @contextmanager
    def admit(self, caller: Caller, num_bytes: int = 0, name: str = "", unique: bool = False) -> Iterator[Ticket]:
        """Let a request in for as long as the context lasts.

        Args:
            num_bytes: size of its message.
            name: by which `find` finds it, unless another of the caller's has that name. "": none.
            unique: refuse it in that case.

        Raises `DuplicateIdError` for a name that is taken, `LimitError` where a limit is reached.
        """
        limits = self._limits
        key = (caller.scope, name)
        if unique and name and key in self._named:
            raise DuplicateIdError(f"a request with id {shorten(name)} has not ended yet: give another id")
        most = limits.max_queued_requests
        if self.queued_requests >= most:
            raise LimitError(f"{most} requests are queued, which is the limit (max_queued_requests): try again later")
        client = caller.client
        most = limits.max_requests_per_client
        if self._requests_of[client] >= most:
            raise LimitError(
                f"this client has {most} requests that have not ended, which is the limit (max_requests_per_client)"
            )
        held, most = self._bytes_of[client], limits.max_client_bytes
        if held and held + num_bytes > most:
            raise LimitError(
                f"this client's requests that have not ended have {held} bytes: {num_bytes} more would exceed the "
                f"limit of {most} (max_client_bytes)"
            )
        ticket = Ticket(self)
        named = bool(name) and self._named.setdefault(key, ticket.id) == ticket.id
        self.ids.add(ticket.id)
        self._requests_of[client] += 1
        self._bytes_of[client] += num_bytes
        self.queued_requests += 1
        try:
            yield ticket
        finally:
            ticket.leave_queue()
            self.ids.discard(ticket.id)
            if named:
                del self._named[key]
            self._requests_of[client] -= 1
            self._bytes_of[client] -= num_bytes
            if not self._requests_of[client]:
                del self._requests_of[client], self._bytes_of[client]

    def find(self, caller: Caller, name: str) -> list[str]:
        """Ids of the requests that a caller means by a name: its own, or else, where it may end those of others, all
        that have this name."""
        own = self._named.get((caller.scope, name))
        if own is not None:
            return [own]
        if not caller.may_abort_all:
            return []
        return [request_id for (_, other), request_id in self._named.items() if other == name]

    def add_tokens(self, num_tokens: int) -> None:
        """Count a prompt's tokens as queued. Raises `LimitError`. A prompt that is alone is never too long here."""
        most = self._limits.max_queued_tokens
        if self.queued_tokens and self.queued_tokens + num_tokens > most:
            raise LimitError(
                f"prompts of {self.queued_tokens} tokens are queued: {num_tokens} more would exceed the limit of "
                f"{most} (max_queued_tokens); try again later"
            )
        self.queued_tokens += num_tokens
