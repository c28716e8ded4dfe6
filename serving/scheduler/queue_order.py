"""Who is served first."""

from dataclasses import dataclass

from serving.scheduler.view import RunningRequest, WaitingRequest

Key = tuple[int, float, float, str]


@dataclass(frozen=True)
class QueueOrder:
    """Earliest due first.

    A request is due at its deadline, and at the latest `patience_s` after its arrival; each level of priority moves
    that by `level_s`. The time is fixed on arrival, so waiting is ageing: requests that come later are due later, and
    at some time no one comes any more who is due before it. A request that has waited `starving_s` goes ahead of all
    that have not, however far their priorities are apart, and of several the one that has waited longest. Only waiting
    counts: a request that was served at once and has run for long may be preempted as any other. Requests beyond their
    client's share go last, in this order too.
    """

    patience_s: float = 30.0
    """A request without a deadline counts as due this long after its arrival."""
    level_s: float = 60.0
    """Seconds of waiting that make up for one level of priority."""
    starving_s: float | None = 300.0
    """Waiting time, without the time that it ran, after which only that counts. None: priority counts for ever."""

    def starves(self, request: WaitingRequest | RunningRequest, now_s: float) -> bool:
        """It has waited for `starving_s`, so that only this counts."""
        if self.starving_s is None or request.beyond_share:
            return False
        return request.waited_s(now_s) >= self.starving_s

    def due_key(self, request: WaitingRequest | RunningRequest) -> Key:
        """Sorts requests that don't starve; the time makes no difference."""
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
        """Sorts requests, those to be served first in front."""
        if self.starves(request, now_s):
            since_s = request.since_s if isinstance(request, WaitingRequest) else now_s - request.queued_s
            return (0, since_s, request.arrival_s, request.request_id)
        return self.due_key(request)
