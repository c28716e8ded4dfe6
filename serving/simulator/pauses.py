"""Pauses of requests while a merged instance uses their devices.

Paused requests keep their KV pages and make no progress. The merged instance is the group, and the instances of the
paused requests are its members.
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
    """Replace a merged instance (`group`) by the paused instances on its devices, whose requests continue.

    The merged instance must run no requests.
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
    """Detach the paused instances from a merged instance (`group`), and return them.

    Also record how long their requests were paused.
    """
    members, group.paused = list(group.paused), ()
    for member in members:
        host.tally.degrees.append((host.now_s, member.degree, member.degree))
        if member.num_decoding:
            host.tally.add_gaps(host.now_s - member.paused_s, member.num_decoding)
    return members


def next_victim(instance: SimInstance) -> tuple[SimInstance, Run]:
    """Choose the request to preempt if an instance lacks KV pages. Return `(owner, request)`.

    `owner` is the instance of the request: `instance`, or a paused instance on the same devices. One candidate is the
    last running request in the order `Run.order`. If requests are paused, the last request of the fullest paused
    instance is also a candidate. The less urgent candidate is chosen, or the paused candidate if both are equally
    urgent.
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
    """Update `room_tokens` of each instance that has paused instances on its devices.

    Call this function after a request was removed. If it was paused, running requests may use its memory.
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
        Pair (request, new instance) for each request. The new instance is None if the request fits on none of them.
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
