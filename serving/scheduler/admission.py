"""Admission to the queue: rejection of some waiting requests, and the order of the others.

A request is rejected if its deadline has passed, if it is too long for every instance, or if the queue is full.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from serving.scheduler.actions import Reject, RejectKind
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.view import ClusterView, WaitingRequest


@dataclass(frozen=True)
class Admission:
    """Order and limits of the queue."""

    order: QueueOrder = field(default_factory=QueueOrder)
    max_queued_requests: int | None = None
    """Maximum number of waiting requests. Preempted requests do not count. None: no limit.

    If there are more, requests beyond their client's share are rejected first, and then the latest arrivals.
    """
    max_queued_tokens: int | None = None
    """Maximum number of prompt tokens of all waiting requests. None: no limit.

    Requests are counted and rejected as for `max_queued_requests`.
    """

    def screen(self, view: ClusterView, capacity_tokens: int, holder: str) -> tuple[list[Reject], list[WaitingRequest]]:
        """Reject the waiting requests that cannot be served. Return `(rejections, other requests in queue order)`.

        `QueueOrder` defines the order. A request is rejected if its deadline has passed, if it is too long, or if the
        queue is over a limit. It is too long if its maximum length exceeds `capacity_tokens` or the context of the
        model.

        Args:
            capacity_tokens: capacity of the largest possible instance, in tokens.
            holder: name of the largest possible instance, for error messages.
        """
        limit = min(capacity_tokens, view.max_model_len or capacity_tokens)
        rejects, kept = [], []
        for request in view.queue:
            if request.deadline_s is not None and request.deadline_s <= view.now_s:
                rejects.append(self._deadline(view, request, request.deadline_s))
            elif request.max_total_tokens > limit:
                rejects.append(self._never_fits(request, limit, capacity_tokens, holder))
            else:
                kept.append(request)
        if self.max_queued_requests is not None or self.max_queued_tokens is not None:
            overflow = {reject.request_id: reject for reject in self._overflow(kept)}
            rejects += overflow.values()
            kept = [request for request in kept if request.request_id not in overflow]
        return rejects, self.order.sort(kept, view.now_s)

    def _deadline(self, view: ClusterView, request: WaitingRequest, deadline_s: float) -> Reject:
        waited_s, allowed_s = view.now_s - request.arrival_s, deadline_s - request.arrival_s
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

    def _overflow(self, requests: Iterable[WaitingRequest]) -> list[Reject]:
        """Return the rejections that bring the queue within its limits.

        Requests beyond their client's fair share are rejected first, and then the latest arrivals. Preempted requests
        are never rejected, and do not count against the limits.
        """
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
