"""Requests that wait for nothing: expired, too long for any instance, or too many."""

from dataclasses import dataclass, field

from serving.scheduler.actions import Reject, RejectKind
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.view import ClusterView, WaitingRequest


@dataclass(frozen=True)
class Admission:
    """Sorts the queue, and turns away what can't be served."""

    order: QueueOrder = field(default_factory=QueueOrder)
    max_queued_requests: int | None = None
    """Requests that may wait; the last to arrive are turned away. None: any number."""
    max_queued_tokens: int | None = None
    """Prompt tokens that may wait, likewise."""

    def screen(self, view: ClusterView, capacity_tokens: int, holder: str) -> tuple[list[Reject], list[WaitingRequest]]:
        """Those to turn away, and the others in the order in which they are served.

        `capacity_tokens` is the most that an instance could hold, and `holder` names that instance.
        """
        rejects, kept = [], []
        for request in view.queue:
            reject = self._deadline(view, request) or self._never_fits(view, request, capacity_tokens, holder)
            if reject is not None:
                rejects.append(reject)
            else:
                kept.append(request)
        rejects += (overflow := self._overflow(kept))
        turned_away = {reject.request_id for reject in overflow}
        kept = [request for request in kept if request.request_id not in turned_away]
        return rejects, sorted(kept, key=lambda request: self.order.key(request, view.now_s))

    def _deadline(self, view: ClusterView, request: WaitingRequest) -> Reject | None:
        if request.deadline_s is None or view.now_s < request.deadline_s:
            return None
        waited_s = view.now_s - request.arrival_s
        allowed_s = request.deadline_s - request.arrival_s
        reason = f"the deadline of {allowed_s:.3f} s passed while the request waited: {waited_s:.3f} s so far"
        return Reject(request.request_id, RejectKind.DEADLINE, reason)

    def _never_fits(
        self, view: ClusterView, request: WaitingRequest, capacity_tokens: int, holder: str
    ) -> Reject | None:
        limit = min(capacity_tokens, view.max_model_len or capacity_tokens)
        if request.max_total_tokens <= limit:
            return None
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
