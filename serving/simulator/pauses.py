"""Pauses of requests while a merged instance uses their devices.

Paused requests keep their KV pages and make no progress. The merged instance is called the group. The paused instances
are the members of the group.
"""

from serving.simulator.host import Host, drained_s, take_in
from serving.simulator.instance import SimInstance
from serving.simulator.run import Run


def pause(host: Host, members: list[SimInstance], devices: tuple[int, ...]) -> None:
    """Pause instances with their requests, and start a merged instance on the same devices.

    All weights stay in device memory. The first step of the merged instance starts `HostConfig.regroup_s` seconds after
    the running steps of the paused instances have ended.
    """
    ready_s = max(drained_s(host, member) for member in members)
    for member in members:
        take_in(host, member)
    group = host.new_instance(devices, sum(member.capacity_tokens for member in members))
    group.paused, group.ready_s = tuple(members), ready_s + host.config.regroup_s
    group.count_room()
    group.max_requests = min(group.max_requests, host.config.num_slots - len(members[0].runs))
    for member in members:
        member.paused_s = host.now_s
    host.replace(members, [group])
    _changed(host, members[0].degree, group.degree)
    host.begin(group)


def resume(host: Host, group: SimInstance) -> None:
    """Replace a merged instance (group) by its paused members, whose requests continue.

    The group must run no requests.
    """
    ready_s = drained_s(host, group)
    take_in(host, group)
    members = put_back(host, group)
    host.replace([group], members)
    _changed(host, group.degree, members[0].degree)
    for member in members:
        member.ready_s = ready_s + host.config.regroup_s
        host.begin(member)


def put_back(host: Host, group: SimInstance) -> list[SimInstance]:
    """Detach the paused members from a merged instance (group), and return these members.

    Also record how long the requests of the members were paused.
    """
    members, group.paused = list(group.paused), ()
    for member in members:
        host.tally.degrees.append((host.now_s, member.degree, member.degree))
        if member.num_decoding:
            host.tally.add_gaps(host.now_s - member.paused_s, member.num_decoding)
    return members


def next_victim(instance: SimInstance) -> tuple[SimInstance, Run]:
    """Choose the request to preempt if an instance lacks KV pages.

    Return `(owner, request)`. The owner is the instance or a paused instance: the one whose KV pages the request uses.
    One candidate is the running request that is last in the order `Run.order`. If requests are paused, the other
    candidate is the last request of the fullest paused instance. The paused request is chosen, except if it has a
    higher priority than the running request.
    """
    last = instance.last_in_order()
    free = {member: member.capacity_tokens - member.used_tokens() for member in instance.paused if member.runs}
    if free:
        fullest = min(free, key=lambda member: free[member])
        paused = fullest.last_in_order()
        if paused.request.priority >= last.request.priority:
            return fullest, paused
    return instance, last


def count_rooms(instances: list[SimInstance]) -> None:
    """Update how many tokens running requests may use (`room_tokens`) on instances that replace paused instances.

    Call this function after a request was removed. If the removed request was paused, running requests may use its
    room.
    """
    for instance in instances:
        if instance.paused:
            instance.count_room()


def deal(runs: list[Run], steps: int, parts: list[SimInstance], page_size: int) -> list[tuple[Run, SimInstance | None]]:
    """Choose a new instance for each request of an instance that splits. Nothing moves yet.

    The longest request is assigned first. Each request goes to the new instance with the most free tokens.

    Args:
        runs: requests of the instance that splits.
        steps: number of decode steps that have ended on the instance that splits.
        parts: new instances.
        page_size: tokens of a page.

    Returns:
        Pair (request, new instance) for each request. None replaces the instance if the request fits on no new
            instance.
    """
    free = [part.capacity_tokens - part.used_tokens() for part in parts]
    slots = [part.limits.max_requests - len(part.runs) for part in parts]
    dealt: list[tuple[Run, SimInstance | None]] = []
    for run in sorted(runs, key=lambda r: (-r.num_tokens(steps), r.order)):
        place = max(range(len(parts)), key=lambda index: (slots[index] > 0, free[index], -index))
        part, needed = parts[place], -(-(run.num_tokens(steps) + 1) // page_size) * page_size
        if free[place] < needed or slots[place] <= 0 or run.request.max_total_tokens > part.capacity_tokens:
            dealt.append((run, None))
            continue
        free[place] -= needed
        slots[place] -= 1
        dealt.append((run, part))
    return dealt


def _changed(host: Host, before: int, after: int) -> None:
    host.tally.regroups.append((host.now_s, before, after))
