"""Estimates of when waiting requests get their tokens, from measured durations.

An estimate is None if a measurement is missing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate

from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


def step_s(view: ClusterView, instance: InstanceView) -> float | None:
    """Return the seconds of a decode step on an instance, or None if none was measured.

    If the instance has run no step yet, return the seconds measured on other instances of its tensor-parallel degree.
    """
    return view.timing.step_s(instance.degree) if instance.step_s is None else instance.step_s


def wait_s(view: ClusterView, room: Room, instance: InstanceView, need: int) -> float | None:
    """Estimate the seconds until an instance has `need` free tokens of KV cache and a free slot.

    The estimate assumes that every running request reaches its maximum length, and that no other request starts. If
    all running requests together free too few tokens, return the seconds until the last running request ends. Return
    None if no step or no prompt was measured at the tensor-parallel degree of the instance.
    """
    lacks = need - room.free(instance)
    if lacks <= 0 and room.has_slot(instance):
        return 0.0
    one_step_s = step_s(view, instance)
    prompts_s = view.timing.prompt_s(instance.uncomputed_tokens, instance.degree)
    if one_step_s is None or prompts_s is None:
        return None
    if not instance.running:
        return 0.0
    ordered = sorted(instance.running, key=lambda r: r.max_total_tokens - r.num_tokens)
    freed = list(accumulate(room.freed_by(request) for request in ordered))
    # If all requests together free too few tokens, take the request that ends last.
    last = ordered[min(bisect_left(freed, lacks), len(ordered) - 1)]
    return prompts_s + (last.max_total_tokens - last.num_tokens) * one_step_s


def first_token_s(
    view: ClusterView,
    room: Room,
    instances: Iterable[InstanceView],
    request: WaitingRequest,
    taken_s: Mapping[int, float] | None = None,
) -> float | None:
    """Estimate the seconds until the first token of a request, on the instance that would generate it first.

    The result is None (unknown) if a measurement is missing, or if no instance can hold the request. It is also None if
    an instance will be able to hold the request after a merge or split that is in progress.

    Args:
        instances: instances to choose from.
        taken_s: seconds until an instance has finished a waiting request that goes first, by instance id. For an
            instance without an entry, `wait_s` estimates the seconds until the instance has room.
    """
    times = []
    for instance in instances:
        to = instance.transition_to
        if to is not None and view.final_capacity(instance) >= request.max_total_tokens:
            return None
        if to is not None or instance.draining or instance.capacity_tokens < request.max_total_tokens:
            continue
        start_s = (taken_s or {}).get(instance.id)
        if start_s is None:
            start_s = wait_s(view, room, instance, room.need(request))
        prompt_s = view.timing.prompt_s(request.prompt_tokens, instance.degree)
        if start_s is None or prompt_s is None:
            return None
        times.append(start_s + prompt_s)
    return min(times, default=None)


def merge_s(view: ClusterView, members: tuple[InstanceView, ...], degree: int, request: WaitingRequest) -> float | None:
    """Estimate the seconds until the first token of a request if the instances `members` merge to `degree` now.

    This is the time of the merge, plus the time to compute the prompt of the request and the uncomputed prompts of the
    members. If no merge from the lowest degree of the members was measured, use the slowest measured merge to `degree`.
    """
    timing, lowest = view.timing, min(i.degree for i in members)
    others = [s for (before, after), s in timing.transformations_s.items() if before < after == degree]
    seconds = timing.transformation_s(lowest, degree) or max(others, default=None)
    left = sum(i.uncomputed_tokens for i in members)
    prompt_s = timing.prompt_s(left + request.prompt_tokens, degree)
    return None if seconds is None or prompt_s is None else seconds + prompt_s


def merge_pays(
    view: ClusterView, request: WaitingRequest, wait_s: float | None, merge_s: float | None, slo_s: float
) -> bool:
    """Return whether a request would miss its TTFT SLO by waiting, and get its first token earlier by a merge.

    If a time is unknown, the result is False.

    Args:
        wait_s: seconds from now to the first token if the request waits for an existing instance. None: unknown.
        merge_s: seconds from now to the first token if instances merge for the request. None: unknown.
        slo_s: TTFT SLO of the request, in seconds after its arrival.
    """
    if wait_s is None or merge_s is None:
        return False
    return wait_s > max(merge_s, slo_s - (view.now_s - request.arrival_s))


def run_s(view: ClusterView, degree: int, request: WaitingRequest) -> float | None:
    """Estimate how many seconds a request runs on an instance of `degree` until it reaches its maximum length."""
    prompt_s, one_step_s = view.timing.prompt_s(request.prompt_tokens, degree), view.timing.step_s(degree)
    if prompt_s is None or one_step_s is None:
        return None
    return prompt_s + (request.max_total_tokens - request.prompt_tokens) * one_step_s


def meets_own_slos(
    view: ClusterView, instance: InstanceView, request: WaitingRequest, prompt_tokens_before: int
) -> bool:
    """Return whether an instance with room would meet the latency limits that the request itself sets.

    If the request sets no limit, or if a measurement is missing, the result is False.

    Args:
        prompt_tokens_before: prompt tokens that the instance computes before the prompt of this request.
    """
    if request.ttft_slo_s is None and request.tpot_slo_s is None:
        return False
    one_step_s = step_s(view, instance)
    if request.ttft_slo_s is not None:
        prompt_s = view.timing.prompt_s(prompt_tokens_before + request.prompt_tokens, instance.degree)
        if prompt_s is None or view.now_s - request.arrival_s + prompt_s + (one_step_s or 0.0) > request.ttft_slo_s:
            return False
    return request.tpot_slo_s is None or (one_step_s is not None and one_step_s <= request.tpot_slo_s)


def is_slow(instance: InstanceView, request: WaitingRequest, default_s: float | None) -> bool:
    """Return whether recent steps of an instance took longer than the TPOT SLO of a request.

    `default_s` is the TPOT SLO, in seconds, of requests without their own SLO. None: no limit.
    """
    slo_s = default_s if request.tpot_slo_s is None else request.tpot_slo_s
    return slo_s is not None and instance.step_s is not None and instance.step_s > slo_s


def split_time_s(
    view: ClusterView, request: WaitingRequest, degree: int, wait_s: float, default_s: float | None
) -> float:
    """Return the time at which merged instances should split for a short request that finds no room.

    This is the earlier of two times: `wait_s` seconds after the request began to wait, and the latest time at which a
    split still lets the request meet its TTFT SLO. If splits or prompts were not measured, only the first time counts.

    Args:
        degree: tensor-parallel degree of the merged instances.
        default_s: TTFT SLO, in seconds, of requests without their own SLO. None: no limit.
    """
    at_s, slo_s = request.since_s + wait_s, default_s if request.ttft_slo_s is None else request.ttft_slo_s
    split_s = view.timing.transformation_s(degree, view.base_degree)
    prompt_s = view.timing.prompt_s(request.prompt_tokens, view.base_degree)
    if slo_s is None or split_s is None or prompt_s is None:
        return at_s
    return min(at_s, request.arrival_s + slo_s - split_s - prompt_s)
