"""Admission of requests to the server: their ids, and limits on their number and size."""

import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.shorten import shorten
from serving.grpc_server.callers import Caller
from serving.grpc_server.config import Limits
from serving.grpc_server.priority_classes import PriorityClass, class_of
from serving.grpc_server.statuses import DuplicateIdError, LimitError

# For calls that generate nothing.
_NO_PARAMS = SamplingParams()


class Ticket:
    """Admitted request. It counts as queued until its first token is generated, or until it ends without a token.

    Attributes:
        id: id of the request inside this server. No client can choose this id.
    """

    def __init__(self, admission: "OpenRequests", priority_class: PriorityClass):
        self.id = uuid.uuid4().hex
        self._admission, self._class = admission, priority_class
        self._tokens = 0
        self._queued = True

    def count_tokens(self, num_tokens: int) -> None:
        """Add the tokens of the prompt to the number of queued tokens.

        Raises `LimitError` if too many tokens are queued. `OpenRequests.add_tokens` describes this limit.
        """
        self._admission.add_tokens(num_tokens, self._class)
        self._tokens = num_tokens

    def leave_queue(self) -> None:
        """Stop counting the request as queued. Further calls have no effect."""
        if self._queued:
            self._queued = False
            self._admission.requests_by_class[self._class] -= 1
            self._admission.tokens_by_class[self._class] -= self._tokens


class OpenRequests:
    """Admitted requests that have not ended. All methods run in the event loop of the server.

    Attributes:
        ids: ids that this server has given to the admitted requests.
        requests_by_class: number of queued requests of each priority class.
        tokens_by_class: number of prompt tokens of the queued requests of each priority class.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._class_limits = {
            PriorityClass.URGENT: ("max_queued_urgent_requests", limits.max_queued_urgent_requests),
            PriorityClass.BEST_EFFORT: ("max_queued_best_effort_requests", limits.max_queued_best_effort_requests),
        }
        self._requests_of: dict[str, Counter[PriorityClass]] = {}
        self._samples_of: dict[str, Counter[PriorityClass]] = {}
        self._bytes_of: Counter[str] = Counter()
        self._named: dict[tuple[str, str], str] = {}  # id by scope and name
        self.ids: set[str] = set()
        self.requests_by_class: Counter[PriorityClass] = Counter()
        self.tokens_by_class: Counter[PriorityClass] = Counter()

    @contextmanager
    def admit(
        self,
        caller: Caller,
        num_bytes: int = 0,
        name: str = "",
        unique: bool = False,
        params: SamplingParams = _NO_PARAMS,
    ) -> Iterator[Ticket]:
        """Admit a request. It counts against the limits until the `with` block ends.

        Args:
            caller: client that sent the request.
            num_bytes: bytes of the request (`Call.num_bytes`).
            name: id that the client chose, by which `find` finds the request. "": no id. If an unfinished request of
                the caller has the same name, `find` finds only the earlier request.
            unique: whether to refuse the request if an unfinished request of the caller has the same name.
            params: sampling settings. `priority` determines the priority class of the request.

        Raises:
            DuplicateIdError: `unique` is true, and an unfinished request of the caller has the same name.
            LimitError: a limit is reached.
        """
        key = (caller.scope, name)
        if unique and name and key in self._named:
            raise DuplicateIdError(f"a request with id {shorten(name)} has not ended yet: give another id")
        mine, client, num_samples = class_of(params.priority), caller.client, params.n
        self._check_queue(mine)
        self._check_client(client, mine, num_samples, num_bytes)
        ticket = Ticket(self, mine)
        named = bool(name) and self._named.setdefault(key, ticket.id) == ticket.id
        self.ids.add(ticket.id)
        self._requests_of.setdefault(client, Counter())[mine] += 1
        self._samples_of.setdefault(client, Counter())[mine] += num_samples
        self.count_bytes(client, num_bytes)
        self.requests_by_class[mine] += 1
        try:
            yield ticket
        finally:
            ticket.leave_queue()
            self.ids.discard(ticket.id)
            if named:
                del self._named[key]
            self._requests_of[client][mine] -= 1
            self._samples_of[client][mine] -= num_samples
            self.count_bytes(client, -num_bytes)
            if not self._requests_of[client].total():
                del self._requests_of[client], self._samples_of[client]

    def count_bytes(self, client: str, num_bytes: int) -> None:
        """Count bytes that the server keeps in memory for a client. A negative `num_bytes` reduces the count."""
        self._bytes_of[client] += num_bytes
        if not self._bytes_of[client]:
            del self._bytes_of[client]

    def check_bytes(self, client: str, num_bytes: int) -> None:
        """Raise `LimitError` if `num_bytes` more bytes of a client would exceed `max_client_bytes`.

        If the server keeps no bytes for the client yet, any number is accepted.
        """
        held, most = self._bytes_of[client], self._limits.max_client_bytes
        if held and held + num_bytes > most:
            raise LimitError(
                f"this client's unfinished requests and unread replies have {held} bytes: "
                f"{num_bytes} more would exceed the limit of {most} (max_client_bytes)"
            )

    def find(self, caller: Caller, name: str) -> list[str]:
        """Return the server's ids of the requests for which clients chose the id `name`.

        If the caller has a request with this name, return only the id of this request. If the caller has none, and
        `caller.may_abort_all` is true, return the ids of all requests with this name. In all other cases, return [].
        """
        own = self._named.get((caller.scope, name))
        if own is not None:
            return [own]
        if not caller.may_abort_all:
            return []
        return [request_id for (_, other), request_id in self._named.items() if other == name]

    def add_tokens(self, num_tokens: int, mine: PriorityClass) -> None:
        """Add the tokens of a prompt of priority class `mine` to the queued tokens.

        The limit `max_queued_tokens` holds for the queued tokens of this class and of more urgent classes together.
        Raises `LimitError` if the new prompt would exceed it. The first queued prompt may have any length.
        """
        queued, most = _up_to(mine, self.tokens_by_class), self._limits.max_queued_tokens
        if queued and queued + num_tokens > most:
            raise LimitError(
                f"prompts of {queued} tokens are queued{_and_before(mine)}: {num_tokens} more would exceed the limit "
                f"of {most} (max_queued_tokens); try again later"
            )
        self.tokens_by_class[mine] += num_tokens

    def _check_client(self, client: str, mine: PriorityClass, num_samples: int, num_bytes: int) -> None:
        """Raise `LimitError` if a new request of priority class `mine` would exceed a limit of its client."""
        limits = self._limits
        most = limits.max_requests_per_client
        if _up_to(mine, self._requests_of.get(client, Counter())) >= most:
            raise LimitError(
                f"this client has {most} requests that have not ended{_and_before(mine)}, which is the limit "
                "(max_requests_per_client)"
            )
        held, most = _up_to(mine, self._samples_of.get(client, Counter())), limits.max_samples_per_client
        if held + num_samples > most:
            raise LimitError(
                f"this client's requests that have not ended{_and_before(mine)} have {held} samples: {num_samples} "
                f"more would exceed the limit of {most} (max_samples_per_client)"
            )
        self.check_bytes(client, num_bytes)

    def _check_queue(self, mine: PriorityClass) -> None:
        """Raise `LimitError` if no further request of priority class `mine` may be queued."""
        most = self._limits.max_queued_requests
        if _up_to(mine, self.requests_by_class) >= most:
            raise LimitError(
                f"{most} requests are queued{_and_before(mine)}, which is the limit (max_queued_requests): "
                "try again later"
            )
        name, most = self._class_limits.get(mine, ("", self._limits.max_queued_requests))
        if self.requests_by_class[mine] >= most:
            raise LimitError(f"{most} {mine.label} requests are queued, which is the limit ({name}): try again later")


def _up_to(mine: PriorityClass, counts: Counter[PriorityClass]) -> int:
    """Return the sum of the counts of priority class `mine` and of all more urgent classes."""
    return sum(counts[it] for it in PriorityClass if it <= mine)


def _and_before(mine: PriorityClass) -> str:
    """Return words such as " of class standard or more urgent" for an error message, or "" for all classes."""
    return "" if mine is PriorityClass.BEST_EFFORT else f" of class {mine.label} or more urgent"
