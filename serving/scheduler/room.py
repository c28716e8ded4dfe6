"""What is left on the instances while a policy hands it out."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from serving.scheduler.instance_tables import InstanceTables, discard
from serving.scheduler.merge_groups import LoadedGroup, MergeGroup, MergeGroups
from serving.scheduler.view import ClusterView, InstanceView, WaitingRequest


class Room:
    """Free tokens and slots of each instance, less what the policy has given away since the snapshot.

    An instance that is closed takes nothing more this time: it is in transition, draining, or kept for a request that
    waits for it. A policy may keep a room and `refresh` it: only instances whose views have changed cost much then.

    Args:
        reserved_growth: share kept free of what requests may still grow by. 0 admits as vLLM does, where requests that
            find no page are preempted; with 1 no request ever is.

    Attributes:
        home: instances by device.
        merged: instances above the base degree, by id, in the order of devices.
        unsteady: instances that are in transition or draining.
        num_requests: of all instances, paused ones included.
        num_devices: of the cluster, those that are out of service included.
        changed: views of instances that are gone or new since the last snapshot.
        most_have_slots: as of `InstanceTables`.
    """

    def __init__(self, view: ClusterView, reserved_growth: float):
        self._growth, self._tables = reserved_growth, InstanceTables(view, reserved_growth)
        self.facts = self._tables.facts
        self._merge_groups: dict[int, MergeGroups[MergeGroup]] = {}
        self._groups_by_load: dict[int, MergeGroups[LoadedGroup]] = {}
        self._slots: dict[int, int] = {}
        self._asked: tuple[WaitingRequest | None, int] = (None, 0)
        """The request that `need` was asked for last, and what it needs."""
        self.refresh(view)

    def refresh(self, view: ClusterView) -> None:
        """Begin again, with another snapshot."""
        tables, self._view, self.num_devices = self._tables, view, view.num_devices
        for number in self._slots:  # what was given away comes back
            self._touch(tables.home[number])
        self.changed = tables.update(view)
        for instance in self.changed:
            self._touch(instance)
        self.home, self.merged, self.unsteady = tables.home, tables.merged, tables.unsteady
        self.num_requests, self.most_have_slots = tables.num_requests, tables.most_have_slots
        self._by_free, self._by_load = list(tables.by_free), list(tables.by_load)
        self._free = dict(tables.uncommitted)
        self._slots = {}
        self._given: dict[int, int] = {}
        self._closed: set[int] = set()

    def _touch(self, instance: InstanceView) -> None:
        for groups in (*self._merge_groups.values(), *self._groups_by_load.values()):
            groups.touch(instance.devices)

    def need(self, request: WaitingRequest) -> int:
        """Tokens that must be free for a request to start, in whole pages."""
        if request is not self._asked[0]:  # a decision asks for one request several times
            self._asked = request, self._need(request)
        return self._asked[1]

    def _need(self, request: WaitingRequest) -> int:
        left = max(request.max_total_tokens - request.prompt_tokens, 0)
        return self._view.whole_pages(
            request.prompt_tokens + min(left, self._view.page_size + int(self._growth * left))
        )

    @property
    def open(self) -> Iterator[InstanceView]:
        """Instances that take requests, in the order of devices."""
        closed, unsteady = self._closed, self.unsteady
        return (i for i in self._tables.instances if i.id not in closed and i.id not in unsteady)

    @property
    def any_open(self) -> bool:
        """Some instance takes requests, and has a slot."""
        return bool(self._by_free)

    def members(self, devices: Iterable[int]) -> tuple[InstanceView, ...]:
        """Instances that have any of these devices."""
        found, home = {}, self.home
        for device in devices:
            if (instance := home.get(device)) is not None:
                found[instance.id] = instance
        return tuple(found.values())

    def parts(self, devices: tuple[int, ...]) -> tuple[InstanceView, ...] | None:
        """Instances that would merge into one on these devices: more than one, and on no others. None where there are
        no such instances."""
        first = self.home.get(devices[0])
        if first is None or len(first.devices) >= len(devices):
            return None
        members = self.members(devices)
        whole = len(members) > 1 and sum([len(i.devices) for i in members]) == len(devices)
        return members if whole else None

    def merge_groups(self, degree: int) -> MergeGroups[MergeGroup]:
        """Groups of instances that may merge to a degree by the room that is left, whatever becomes of them: some may
        be in transition, or closed."""
        if degree not in self._merge_groups:

            def rank(devices: tuple[int, ...]) -> MergeGroup | None:
                if (members := self.parts(devices)) is None:
                    return None
                mixed = len({len(i.devices) for i in members}) > 1
                return MergeGroup(mixed, -self.merged_free(members, degree), devices, members)

            self._merge_groups[degree] = MergeGroups(degree, self._view.num_devices, rank)
        return self._merge_groups[degree]

    def groups_by_load(self, degree: int) -> MergeGroups[LoadedGroup]:
        """The same groups in another order."""
        if degree not in self._groups_by_load:

            def rank(devices: tuple[int, ...]) -> LoadedGroup | None:
                if (members := self.parts(devices)) is None:
                    return None
                load = sum([self.load(i) for i in members]) / len(members)
                kind = members[0].degree if len({i.degree for i in members}) == 1 else None
                idle = not any(i.running for i in members)
                return LoadedGroup(load, devices, self.merged_free(members, degree), 0 if idle else kind, members)

            self._groups_by_load[degree] = MergeGroups(degree, self._view.num_devices, rank)
        return self._groups_by_load[degree]

    def free(self, instance: InstanceView) -> int:
        """Tokens that no one has or was promised; below zero where more was promised than there is."""
        return self._free[instance.id]

    def roomiest(self) -> list[InstanceView]:
        """Instances above the base degree, those first that have most room once their long requests are done."""
        tables, free = self._tables, self._free
        entries = list(tables.by_room_to_come)
        for number in self._slots.keys() & self.merged.keys():  # what they have was given away
            taken = tables.uncommitted[number] - free[number]
            room = tables.room_to_come(self.merged[number])
            discard(entries, (-room, number))
            insort(entries, (taken - room, number))
        return [self.merged[number] for _, number in entries]

    def has_slot(self, instance: InstanceView) -> bool:
        """It can run one more request."""
        return self._slots.get(instance.id, instance.free_slots) > 0

    def load(self, instance: InstanceView) -> float:
        """The instance's load with what was given to it since the snapshot: prompts yet to be computed."""
        return instance.load + 2 * self._given.get(instance.id, 0) / instance.capacity_tokens

    def takes(self, instance: InstanceView) -> bool:
        """It is not closed."""
        return instance.id not in self._closed and instance.id not in self.unsteady

    def is_untouched(self, instance: InstanceView) -> bool:
        """Whether it was not closed since the snapshot, and nothing of it was given away."""
        return instance.id not in self._closed and instance.id not in self._slots

    def close(self, instance: InstanceView) -> None:
        """Keep everybody else away."""
        if self.takes(instance):
            self._unlist(instance)
        self._closed.add(instance.id)

    def _unlist(self, instance: InstanceView) -> None:
        if self.has_slot(instance):
            discard(self._by_free, (self._free[instance.id], -instance.id))
            discard(self._by_load, (self._view.has_long(instance), self.load(instance), instance.id))

    def _list(self, instance: InstanceView) -> None:
        if self.has_slot(instance):
            insort(self._by_free, (self._free[instance.id], -instance.id))
            insort(self._by_load, (self._view.has_long(instance), self.load(instance), instance.id))

    def can_join(self, instance: InstanceView, request: WaitingRequest) -> bool:
        """A request that fits the base degree can begin on an instance in transition, beside those that wait for its
        new degree (`keep_coming`)."""
        need = self.need(request)
        has_room = instance.joinable_tokens >= need and self._free[instance.id] >= need
        return has_room and instance.id not in self._closed and not instance.draining and self.has_slot(instance)

    def joinable(self, request: WaitingRequest) -> InstanceView | None:
        """The instance in transition that `can_join` is true of and that has most room."""
        options = [i for i in self.unsteady.values() if self.can_join(i, request)]
        return max(options, key=lambda i: (i.joinable_tokens, -i.id), default=None)

    def join(self, instance: InstanceView, request: WaitingRequest) -> str:
        """Give a request to an instance in transition, and return why. It takes no other this time: the room of its
        parts differs."""
        self.give(instance, request)
        self.close(instance)
        return f"it computes prompts as it becomes TP{instance.transition_to}"

    def keep_coming(self, request: WaitingRequest) -> None:
        """Set room aside for a request that waits for the new degree of an instance in transition: where it will have
        room, and the least degree of those; else where most is free."""
        need, view = self.need(request), self._view
        options = [
            (self._free[i.id] < need, i.transition_to, -self._free[i.id], i.id)
            for i in self.unsteady.values()
            if i.transition_to is not None and not i.draining and view.capacity_to_come(i) >= request.max_total_tokens
        ]
        if options:
            self._take(self.unsteady[min(options)[-1]], need)

    def keep_for(self, request: WaitingRequest) -> None:
        """Keep everybody else away from where a request that finds no room now will find it first."""
        for _, number in reversed(self._by_free):
            if (instance := self.home[-number]).capacity_tokens >= request.max_total_tokens:
                return self.close(instance)
        return None

    def set_aside(self, instance: InstanceView, request: WaitingRequest, freed: int) -> None:
        """Keep room for a request that goes to an instance once others have freed that many tokens. Until then the rest
        of the instance may be given away."""
        self._take(instance, -min(freed - self.need(request), 0))

    def _take(self, instance: InstanceView, tokens: int, given: int = 0, slots: int = 0) -> None:
        listed = self.takes(instance)
        if listed:
            self._unlist(instance)
        number = instance.id
        self._free[number] -= tokens
        self._slots[number] = self._slots.get(number, instance.free_slots) - slots
        self._given[number] = self._given.get(number, 0) + given
        if tokens:
            self._touch(instance)
        if listed:
            self._list(instance)

    def num_with_room(self, request: WaitingRequest) -> int:
        """Open instances with that many free tokens, whatever their capacity."""
        return len(self._by_free) - bisect_left(self._by_free, (self.need(request), -(2**31)))

    def by_load(self) -> Iterable[InstanceView]:
        """Open instances with a slot, those without long requests first, and of these the least loaded first."""
        return (self.home[number] for _, _, number in self._by_load)

    def with_room(self, request: WaitingRequest) -> list[InstanceView]:
        """Open instances with room for a request now, and capacity for what it may grow to."""
        first = bisect_left(self._by_free, (self.need(request), -(2**31)))
        options = (self.home[-number] for _, number in self._by_free[first:])
        return [i for i in options if i.capacity_tokens >= request.max_total_tokens]

    def has_room(self, instance: InstanceView, request: WaitingRequest) -> bool:
        """Whether an instance is one of `with_room`."""
        fits = instance.capacity_tokens >= request.max_total_tokens and self.free(instance) >= self.need(request)
        return fits and self.takes(instance) and self.has_slot(instance)

    def give(self, instance: InstanceView, request: WaitingRequest) -> None:
        """Take a request's tokens and slot."""
        self._take(instance, self.need(request), request.prompt_tokens, 1)

    def merged_free(self, members: tuple[InstanceView, ...], degree: int) -> int:
        """Free tokens of the instance of `degree` that `members` would merge into."""
        gained = self._view.limits[degree].capacity_tokens - sum(i.capacity_tokens for i in members)
        return gained + sum(self._free[i.id] for i in members)


class KeptRoom:
    """The room of one snapshot after the other, made again where sizes have changed. See `Room`."""

    def __init__(self, reserved_growth: float):
        self._growth = reserved_growth
        self._room: Room | None = None
        self._sizes: object = None

    def of(self, view: ClusterView) -> Room:
        """The room of a snapshot; what was given away of the one before counts no more."""
        sizes = view.page_size, view.num_devices, view.base_degree, view.limits
        room, self._room = self._room, None  # none is kept that is half up to date
        if room is None or self._sizes != sizes:
            room = Room(view, self._growth)
        else:
            room.refresh(view)
        self._room, self._sizes = room, sizes
        return room
