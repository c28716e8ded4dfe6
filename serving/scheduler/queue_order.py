"""Order in which waiting requests are served."""

from collections.abc import Iterable
from dataclasses import dataclass

from serving.scheduler.view import RunningRequest, WaitingRequest

Key = tuple[int, float, float, str]
"""Sort key of a request: class, due time, arrival, id.

Class 0: starving requests (`QueueOrder.starves`). They are sorted by the start of their wait, not by the due time.
Class 1: requests within their client's share. Class 2: requests beyond their client's share.
"""


@dataclass(frozen=True)
class QueueOrder:
    """Order of the queue, in three classes.

    1. Requests within their client's fair share that have waited `starving_s` seconds. The longest wait goes first.
    2. Other requests within their client's fair share. The earliest due time goes first.
    3. Requests beyond their client's fair share (`WaitingRequest.beyond_share`). The earliest due time goes first.

    The due time of a request is its arrival plus `patience_s`, or its deadline if the deadline is earlier. In both
    cases, `priority * level_s` seconds are added, so that a request with a negative priority is due earlier. The due
    time never changes. Time in which a request runs is not waiting time.
    """

    patience_s: float = 30.0
    """Seconds from the arrival of a request to its due time, if it has no earlier deadline."""
    level_s: float = 60.0
    """Seconds by which each level of priority delays the due time."""
    starving_s: float | None = 300.0
    """Seconds of waiting after which a request goes ahead of all others. None: priority always matters."""

    def starves(self, request: WaitingRequest | RunningRequest, now_s: float) -> bool:
        """Return whether a request starves (has waited `starving_s` seconds) and is within its client's fair share."""
        if self.starving_s is None or request.beyond_share:
            return False
        return request.waited_s(now_s) >= self.starving_s

    def due_key(self, request: WaitingRequest | RunningRequest) -> Key:
        """Return the sort key of a request by its due time. The request with the lowest key goes first.

        Requests within their client's fair share have lower keys than requests beyond it. The key of a request never
        changes. It does not depend on the time that the request has waited, unlike the result of `key`.
        """
        due_s = request.arrival_s + self.patience_s
        if request.deadline_s is not None:
            due_s = min(due_s, request.deadline_s)
        return (
            1 + request.beyond_share,
            due_s + request.priority * self.level_s,
            request.arrival_s,
            request.request_id,
        )

    def key(self, request: WaitingRequest | RunningRequest, now_s: float) -> Key:
        """Return the sort key of a request at the time `now_s`. The request with the lowest key is served first.

        Requests that starve (`starves`) go before all other requests. The other requests go by `due_key`.
        """
        if self.starves(request, now_s):
            since_s = request.since_s if isinstance(request, WaitingRequest) else now_s - request.queued_s
            return (0, since_s, request.arrival_s, request.request_id)
        return self.due_key(request)

    def sort(self, requests: Iterable[WaitingRequest], now_s: float) -> list[WaitingRequest]:
        """Return the requests in the order in which to serve them."""
        found = list(requests)
        if len(found) > 1:
            found.sort(key=lambda request: self.key(request, now_s))
        return found
