"""When a waiting request would have its first token, by what was measured. None where a measurement is missing."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from serving.scheduler.room import Room
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


def wait_s(view: ClusterView, room: Room, instance: InstanceView, need: int) -> float | None:
    """Seconds until an instance has that many tokens free, if nothing else is given to it: its running requests end one
    after the other, at the latest when they have generated all that they may."""
    lacks = need - room.free(instance)
    if lacks <= 0 and room.has_slot(instance):
        return 0.0
    step_s = view.timing.step_s(instance.degree) if instance.step_s is None else instance.step_s
    prompts_s = view.timing.prompt_s(instance.uncomputed_tokens, instance.degree)
    if step_s is None or prompts_s is None:
        return None
    left, freed = room.facts.endings(instance)
    if not left:
        return 0.0
    # Where more was promised to others than ends: not before all of it.
    return prompts_s + left[min(bisect_left(freed, lacks), len(left) - 1)] * step_s


def first_token_s(
    view: ClusterView,
    room: Room,
    instances: Iterable[InstanceView],
    request: WaitingRequest,
    taken_s: Mapping[int, float],
    later_than_s: float,
) -> float | None:
    """Seconds until a request's first token on the instance that has room for it first, if they are more than
    `later_than_s`. None if they are not, if that cannot be told, or while an instance that could hold it is being made.

    Args:
        instances: those that may hold long requests, now or when their transition has ended.
        taken_s: seconds until others that wait for an instance's room have ended, by its id, where there are any.
    """
    times = []
    for instance in instances:
        to = instance.transition_to
        if to is not None and view.capacity_to_come(instance) >= request.max_total_tokens:
            return None
        if to is not None or instance.draining or instance.capacity_tokens < request.max_total_tokens:
            continue
        start_s = taken_s.get(instance.id)
        if start_s is None:
            start_s = wait_s(view, room, instance, room.need(request))
        prompt_s = view.timing.prompt_s(request.prompt_tokens, instance.degree)
        if start_s is None or prompt_s is None or start_s + prompt_s <= later_than_s:
            return None
        times.append(start_s + prompt_s)
    return min(times, default=None)


def merge_s(view: ClusterView, members: tuple[InstanceView, ...], degree: int, request: WaitingRequest) -> float | None:
    """Seconds until a request's first token on the instance that `members` would merge into at once.

    Where no merge from their lowest degree was measured, one to the same degree stands in for it.
    """
    timing, lowest = view.timing, min(i.degree for i in members)
    others = [seconds for (_, after), seconds in timing.transformations_s.items() if after == degree]
    seconds = timing.transformation_s(lowest, degree) or max(others, default=None)
    left = sum(i.uncomputed_tokens for i in members)
    prompt_s = timing.prompt_s(left + request.prompt_tokens, degree)
    return None if seconds is None or prompt_s is None else seconds + prompt_s


def run_s(view: ClusterView, degree: int, request: WaitingRequest) -> float | None:
    """Seconds that a request runs on an instance at most: its prompt, and all that it may generate."""
    prompt_s, step_s = view.timing.prompt_s(request.prompt_tokens, degree), view.timing.step_s(degree)
    if prompt_s is None or step_s is None:
        return None
    return prompt_s + (request.max_total_tokens - request.prompt_tokens) * step_s
