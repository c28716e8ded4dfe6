"""Requests that wait for nothing: expired, too long for any instance, or too many."""

from dataclasses import dataclass, field

from serving.scheduler.actions import Reject, RejectKind
from serving.scheduler.queue_index import QueueIndex
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.view import ClusterView, WaitingRequest


@dataclass(frozen=True)
class Admission:
    """Turns away what can't be served, and sorts the rest."""

    order: QueueOrder = field(default_factory=QueueOrder)
    max_queued_requests: int | None = None
    """Requests that may wait; the last to arrive are turned away. None: any number."""
    max_queued_tokens: int | None = None
    """Prompt tokens that may wait, likewise."""

    def index(self) -> QueueIndex:
        """An empty index of the queue, in this order, for a policy to keep."""
        return QueueIndex(self.order)

    def turn_away(self, view: ClusterView, index: QueueIndex, capacity_tokens: int, holder: str) -> list[Reject]:
        """Requests that are not to be served, once `index` has the queue of `view`.

        `capacity_tokens` is the most that an instance could hold, and `holder` names that instance. The cost grows with
        their number, and with the queue only where it has a limit.
        """
        rejects = {r.request_id: self._deadline(view, r) for r in index.expired(view.now_s)}
        limit = min(capacity_tokens, view.max_model_len or capacity_tokens)
        for request in index.larger_than(limit):
            rejects.setdefault(request.request_id, self._never_fits(request, limit, capacity_tokens, holder))
        if self.max_queued_requests is not None or self.max_queued_tokens is not None:
            kept = [request for request in view.queue if request.request_id not in rejects]
            rejects |= {reject.request_id: reject for reject in self._overflow(kept)}
        return list(rejects.values())

    def _deadline(self, view: ClusterView, request: WaitingRequest) -> Reject:
        assert request.deadline_s is not None, "it has passed"
        waited_s = view.now_s - request.arrival_s
        allowed_s = request.deadline_s - request.arrival_s
        reason = f"the deadline of {allowed_s:.3f} s passed while the request waited: {waited_s:.3f} s so far"
        return Reject(request.request_id, RejectKind.DEADLINE, reason)

    def _never_fits(self, request: WaitingRequest, limit: int, capacity_tokens: int, holder: str) -> Reject:
        if limit < capacity_tokens:
            why = f"the model's context is {limit}"
        else:
            why = f"the KV cache of {holder} holds {limit}"
        reason = (
            f"prompt and max_tokens are {request.max_total_tokens} tokens, over the limit of {limit}: {why}. "
            "Shorten the prompt or lower max_tokens"
        )
        return Reject(request.request_id, RejectKind.NEVER_FITS, reason)

    def _overflow(self, requests: list[WaitingRequest]) -> list[Reject]:
        """Those over the limits, of requests that did not run before: first those beyond their client's share, then the
        last to arrive."""
        rejects, num_requests, num_tokens = [], 0, 0
        for request in sorted(requests, key=lambda r: (r.beyond_share, r.arrival_s, r.request_id)):
            if request.started:
                continue
            if self.max_queued_requests is not None and num_requests >= self.max_queued_requests:
                reason = f"{num_requests} requests wait, and max_queued_requests={self.max_queued_requests}: try later"
            elif self.max_queued_tokens is not None and num_tokens + request.prompt_tokens > self.max_queued_tokens:
                reason = (
                    f"a prompt of {request.prompt_tokens} tokens after {num_tokens} that wait is over "
                    f"max_queued_tokens={self.max_queued_tokens}: try later"
                )
            else:
                num_requests += 1
                num_tokens += request.prompt_tokens
                continue
            rejects.append(Reject(request.request_id, RejectKind.QUEUE_FULL, reason))
        return rejects
