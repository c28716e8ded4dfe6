"""Prefill and decode on separate instances (DistServe, Splitwise).

Some instances of a host compute prompts. The KV cache then moves to other instances, which decode.
"""

from dataclasses import dataclass, replace

from serving.scheduler import Action, Admission, ClusterView, StaticPolicy
from serving.simulator.host import Host, drained_s, take_in
from serving.simulator.host_config import HandoverConfig
from serving.simulator.instance import SimInstance
from serving.simulator.run import Run
from serving.simulator.tally import Ending


class DisaggregatedPolicy:
    """Policy `disaggregated`: prompts and decoding run on separate instances.

    Each request goes to the least-loaded prefill instance with room. The simulated host then chooses the decode
    instance with the most free tokens.
    """

    name = "disaggregated"

    def __init__(self, num_prefill: int, reserved_growth: float = 0.0):
        self._num_prefill = num_prefill
        self._static = StaticPolicy(Admission(), reserved_growth)

    def decide(self, view: ClusterView) -> list[Action]:
        """Return the next actions (`Policy.decide`).

        A request that is too long for the largest prefill instance or for the largest decode instance is rejected.
        """
        decoding = max(instance.capacity_tokens for instance in view.instances[self._num_prefill :])
        limit = min(decoding, view.max_model_len or decoding)
        return self._static.decide(replace(view, instances=view.instances[: self._num_prefill], max_model_len=limit))


@dataclass
class _Handover:
    """Request on its way from the prefill instance `source` to the decode instance `target`.

    `steps` is the number of decode steps that `source` had run when the prompt was computed. The prompt was computed at
    `since_s`, and the transfer ends at `due_s`. `target` is None until a decode instance has room.
    """

    run: Run
    source: SimInstance
    steps: int
    since_s: float
    target: SimInstance | None = None
    due_s: float = 0.0


class Handovers:
    """Requests on their way from a prefill instance to a decode instance.

    While no decode instance has room for a request, the request keeps its KV pages on the prefill instance.
    """

    def __init__(self, host: Host, config: HandoverConfig):
        self._host, self._config = host, config
        self._pending: list[_Handover] = []
        self.new_times: list[float] = []
        """Times at which `proceed` must be called. The event loop empties this list."""

    def take(self, instance: SimInstance) -> None:
        """Start the transfers from a prefill instance to decode instances, for all requests with a computed prompt.

        If no decode instance has room for a request, a later call of `proceed` starts its transfer. Call this method
        between two steps of the instance. For a decode instance, this method does nothing.
        """
        if instance not in self._host.instances[: self._config.num_prefill]:
            return
        for run in [run for run in instance.runs.values() if run.base]:
            steps = instance.steps
            instance.remove(run)
            self._host.forget(run)
            self._pending.append(_Handover(run, instance, steps, self._host.now_s))
        self.proceed()

    def proceed(self) -> None:
        """End the transfers that are complete. Start each waiting transfer for which a decode instance has room."""
        now_s = self._host.now_s
        for handover in [h for h in self._pending if h.target is not None and h.due_s <= now_s]:
            self._pending.remove(handover)
            self._arrive(handover)
        for handover in self._pending:
            if handover.target is None and (target := self._choose(handover)) is not None:
                tokens = handover.run.num_tokens(handover.steps)
                num_bytes = self._config.token_bytes[handover.source.degree] * tokens
                handover.target = target
                handover.due_s = now_s + self._config.latency_s + num_bytes / self._config.rate
                self._host.tally.kv_bytes += num_bytes * handover.source.degree
                self.new_times.append(handover.due_s)
        for instance in self._host.instances[: self._config.num_prefill]:
            held = [h for h in self._pending if h.source is instance]
            instance.room_tokens = instance.capacity_tokens - sum(self._pages(h, instance) for h in held)
            instance.max_requests = instance.limits.max_requests - len(held)

    def _pages(self, handover: _Handover, instance: SimInstance) -> int:
        size = instance.page_size
        return -(-(handover.run.num_tokens(handover.steps) + 1) // size) * size

    def _choose(self, handover: _Handover) -> SimInstance | None:
        """Return the decode instance with the most free tokens, or None if no instance has room for the request."""
        best, most = None, -1
        for instance in self._host.instances[self._config.num_prefill :]:
            coming = [h for h in self._pending if h.target is instance]
            free = instance.room_tokens - instance.used_tokens(instance.steps_at(self._host.now_s))
            free -= sum(self._pages(h, instance) for h in coming) + self._pages(handover, instance)
            if len(instance.runs) + len(coming) < instance.max_requests and free > most:
                best, most = instance, free
        return best

    def _arrive(self, handover: _Handover) -> None:
        host, run, target = self._host, handover.run, handover.target
        assert target is not None, "the transfer has ended"
        if run.request.deadline_s is not None and run.request.deadline_s <= host.now_s:
            host.finish(run, Ending.DEADLINE)
            return
        ready_s = drained_s(host, target)
        take_in(host, target)
        target.ready_s = max(target.ready_s, ready_s)
        host.tally.add_gaps(host.now_s - handover.since_s, 1)
        target.take_over({run.request.request_id: run}, handover.steps)
        host.rehome(target)
        host.begin(target)
