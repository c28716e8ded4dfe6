"""Who is served first."""

from dataclasses import dataclass

from serving.scheduler.view import RunningRequest, WaitingRequest


@dataclass(frozen=True)
class QueueOrder:
    """Earliest due first.

    A request is due at its deadline, and at the latest `patience_s` after its arrival; each level of priority moves
    that by `level_s`. The time is fixed on arrival, so waiting is ageing: requests that come later are due later, and
    at some time no one comes any more who is due before it. A request that has waited `starving_s` goes ahead of all
    that have not, however far their priorities are apart. Only waiting counts: a request that was served at once and
    has run for long may be preempted as any other. Requests beyond their client's share go last, in this order
    too.
    """

    patience_s: float = 30.0
    """A request without a deadline counts as due this long after its arrival."""
    level_s: float = 60.0
    """Seconds of waiting that make up for one level of priority."""
    starving_s: float | None = 300.0
    """Waiting time, without the time that it ran, after which only arrival counts. None: priority counts for ever."""

    def key(self, request: WaitingRequest | RunningRequest, now_s: float) -> tuple[int, float, float, str]:
        """Sorts requests, those to be served first in front."""
        starves = self.starving_s is not None and request.waited_s(now_s) >= self.starving_s
        if starves and not request.beyond_share:
            return (0, request.arrival_s, request.arrival_s, request.request_id)
        due_s = request.arrival_s + self.patience_s
        if request.deadline_s is not None:
            due_s = min(due_s, request.deadline_s)
        return (
            1 + request.beyond_share,
            due_s + request.priority * self.level_s,
            request.arrival_s,
            request.request_id,
        )
