"""The queue as an executor keeps it, and as a snapshot shows it, so that neither copies it for every decision."""

from collections import deque
from collections.abc import Collection, Iterator

from serving.scheduler.view import WaitingRequest

_MOST_CHANGES = 4096

Change = tuple[str, WaitingRequest | None]
"""A request's id, and the request, or None where it has left the queue."""


class WaitingQueue:
    """Waiting requests by their ids, with what has changed recently."""

    def __init__(self) -> None:
        self._requests: dict[str, WaitingRequest] = {}
        self._changes: deque[Change] = deque(maxlen=_MOST_CHANGES)
        self.version = 0
        """Number of changes since the start."""

    def add(self, request: WaitingRequest) -> None:
        """Queue a request, or replace what is known of it."""
        self._requests[request.request_id] = request
        self._change(request.request_id, request)

    def remove(self, request_id: str) -> None:
        """A request waits no longer. Raises `KeyError` for one that does not wait."""
        del self._requests[request_id]
        self._change(request_id, None)

    def _change(self, request_id: str, request: WaitingRequest | None) -> None:
        self._changes.append((request_id, request))
        self.version += 1

    def snapshot(self) -> "QueueSnapshot":
        """The queue as it is now, at a cost that does not grow with it."""
        return QueueSnapshot(self, self.version, self._requests, self._changes)


class QueueSnapshot(Collection[WaitingRequest]):
    """A queue of a moment. It can be read until the executor changes the queue: raises `RuntimeError` afterwards."""

    def __init__(self, source: WaitingQueue, version: int, requests: dict[str, WaitingRequest], changes: deque[Change]):
        self.source, self.version, self._requests, self._changes = source, version, requests, changes

    def __len__(self) -> int:
        self._check()
        return len(self._requests)

    def __iter__(self) -> Iterator[WaitingRequest]:
        self._check()
        return iter(self._requests.values())

    def __contains__(self, request: object) -> bool:
        self._check()
        return isinstance(request, WaitingRequest) and self._requests.get(request.request_id) == request

    def changes_since(self, version: int) -> list[Change] | None:
        """What has changed from that version of the same source to this one, in order; None if that is not known any
        more."""
        self._check()
        count = self.version - version
        if not 0 <= count <= len(self._changes):
            return None
        return [self._changes[index] for index in range(len(self._changes) - count, len(self._changes))]

    def _check(self) -> None:
        if self.version != self.source.version:
            raise RuntimeError(
                f"the snapshot of the queue is of version {self.version}, and the queue has changed to "
                f"{self.source.version}: take another snapshot"
            )
