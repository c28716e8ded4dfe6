"""SLOs of single requests: whether an instance would keep them, by what was measured."""

from collections.abc import Iterable

from serving.scheduler import estimates
from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


def keeps_own(view: ClusterView, instance: InstanceView, request: WaitingRequest, prompt_tokens_before: int) -> bool:
    """An instance with room for a request would serve it within the SLOs that it names. False where it names none, or
    where a time that matters was not measured yet.

    Args:
        prompt_tokens_before: prompt tokens that the instance computes before those of the request.
    """
    if request.ttft_slo_s is None and request.tpot_slo_s is None:
        return False
    step_s = _step_s(view, instance)
    if request.ttft_slo_s is not None:
        prompt_s = view.timing.prompt_s(prompt_tokens_before + request.prompt_tokens, instance.degree)
        if prompt_s is None or view.now_s - request.arrival_s + prompt_s + (step_s or 0.0) > request.ttft_slo_s:
            return False
    return request.tpot_slo_s is None or (step_s is not None and step_s <= request.tpot_slo_s)


def is_slow(instance: InstanceView, request: WaitingRequest, default_s: float | None) -> bool:
    """Recent steps of an instance took longer than the request's TPOT SLO, or the default where it names none."""
    slo_s = default_s if request.tpot_slo_s is None else request.tpot_slo_s
    return slo_s is not None and instance.step_s is not None and instance.step_s > slo_s


def group_splits_at_s(
    view: ClusterView, request: WaitingRequest, degree: int, wait_s: float, default_s: float | None
) -> float:
    """When groups of a degree are to split for a short request without room: `wait_s` after it began to wait, or
    earlier where its first token would otherwise come after its TTFT SLO (by default `default_s`), as far as a split
    and its prompt were measured."""
    at_s, slo_s = request.since_s + wait_s, default_s if request.ttft_slo_s is None else request.ttft_slo_s
    split_s = view.timing.transformation_s(degree, view.base_degree)
    prompt_s = view.timing.prompt_s(request.prompt_tokens, view.base_degree)
    if slo_s is None or split_s is None or prompt_s is None:
        return at_s
    return min(at_s, request.arrival_s + slo_s - split_s - prompt_s)


def first_token_s(
    view: ClusterView, room: Room, instances: Iterable[InstanceView], request: WaitingRequest
) -> float | None:
    """Seconds until a request's first token on the instance that has room for it first; None if that is not known."""
    need, first_s = room.need(request), None
    prompt_s = {degree: view.timing.prompt_s(request.prompt_tokens, degree) for degree in view.limits}
    for instance in instances:
        wait_s, own_s = estimates.wait_s(view, room, instance, need), prompt_s[instance.degree]
        if wait_s is None or own_s is None:
            return None
        first_s = wait_s + own_s if first_s is None else min(first_s, wait_s + own_s)
    return first_s


def _step_s(view: ClusterView, instance: InstanceView) -> float | None:
    return view.timing.step_s(instance.degree) if instance.step_s is None else instance.step_s
