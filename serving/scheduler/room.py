"""What is left on the instances while a policy hands it out."""

from serving.scheduler.view import ClusterView, InstanceView, RunningRequest, WaitingRequest


class Room:
    """Free tokens and slots of each instance, less what the policy has given away since the snapshot.

    An instance that is closed takes nothing more this time: it is in transition, draining, or kept for a request that
    waits for it.

    Args:
        reserved_growth: share kept free of what requests may still grow by. 0 admits as vLLM does, where requests that
            find no page are preempted; with 1 no request ever is.
    """

    def __init__(self, view: ClusterView, reserved_growth: float):
        self._view, self._growth = view, reserved_growth
        self._free = {instance.id: self._uncommitted(instance) for instance in view.instances}
        self._slots = {instance.id: instance.free_slots for instance in view.instances}
        self._given = {instance.id: 0 for instance in view.instances}
        self.open = [i for i in view.instances if i.transition_to is None and not i.draining]
        """Instances that take requests."""

    def _uncommitted(self, instance: InstanceView) -> int:
        return instance.free_tokens - sum(self._growth_of(request) for request in instance.running)

    def _growth_of(self, request: RunningRequest) -> int:
        """Tokens kept free for a running request: a page, and the reserved share of what may come."""
        left = max(request.max_total_tokens - request.num_tokens, 0)
        return self._view.whole_pages(min(left, self._view.page_size + int(self._growth * left)))

    def need(self, request: WaitingRequest) -> int:
        """Tokens that must be free for a request to start, in whole pages."""
        left = max(request.max_total_tokens - request.prompt_tokens, 0)
        return self._view.whole_pages(
            request.prompt_tokens + min(left, self._view.page_size + int(self._growth * left))
        )

    def free(self, instance: InstanceView) -> int:
        """Tokens that no one has or was promised; below zero where more was promised than there is."""
        return self._free[instance.id]

    def has_slot(self, instance: InstanceView) -> bool:
        """It can run one more request."""
        return self._slots[instance.id] > 0

    def load(self, instance: InstanceView) -> float:
        """The instance's load with what was given to it since the snapshot: prompts yet to be computed."""
        return instance.load + 2 * self._given[instance.id] / instance.capacity_tokens

    def takes(self, instance: InstanceView) -> bool:
        """It is not closed."""
        return any(i.id == instance.id for i in self.open)

    def close(self, instance: InstanceView) -> None:
        """Keep everybody else away."""
        self.open = [i for i in self.open if i.id != instance.id]

    def keep_for(self, request: WaitingRequest) -> None:
        """Keep everybody else away from where a request that finds no room now will find it first."""
        if fitting := [i for i in self.open if i.capacity_tokens >= request.max_total_tokens]:
            self.close(max(fitting, key=lambda i: (self._free[i.id], -i.id)))

    def set_aside(self, instance: InstanceView, request: WaitingRequest, freed: int) -> None:
        """Keep room for a request that goes to an instance once others have freed that many tokens. Until then the rest
        of the instance may be given away."""
        self._free[instance.id] += min(freed - self.need(request), 0)

    def with_room(self, request: WaitingRequest) -> list[InstanceView]:
        """Open instances with room for a request now, and capacity for what it may grow to."""
        need = self.need(request)
        return [
            i
            for i in self.open
            if i.capacity_tokens >= request.max_total_tokens and self._slots[i.id] > 0 and self._free[i.id] >= need
        ]

    def give(self, instance: InstanceView, request: WaitingRequest) -> None:
        """Take a request's tokens and slot."""
        self._free[instance.id] -= self.need(request)
        self._slots[instance.id] -= 1
        self._given[instance.id] += request.prompt_tokens

    def freed_by(self, request: RunningRequest) -> int:
        """Tokens that the end of a running request would free."""
        return self._view.whole_pages(request.num_tokens) + self._growth_of(request)

    def merged_free(self, members: tuple[InstanceView, ...], degree: int) -> int:
        """Free tokens of the instance of `degree` that `members` would merge into."""
        gained = self._view.limits[degree].capacity_tokens - sum(i.capacity_tokens for i in members)
        return gained + sum(self._free[i.id] for i in members)


def fits_split(view: ClusterView, instance: InstanceView, degree: int) -> bool:
    """An instance's requests fit the instances of `degree` that it would fall into, each with a page for its next
    tokens; dealt as the engine does, longest first to where most is free."""
    limits = view.limits[degree]
    parts = instance.degree // degree
    free, slots = [limits.capacity_tokens] * parts, [limits.max_requests] * parts
    for request in sorted(instance.running, key=lambda r: (-r.num_tokens, r.request_id)):
        if request.max_total_tokens > limits.capacity_tokens:
            return False
        part = max(range(parts), key=lambda index: (free[index], -index))
        free[part] -= view.whole_pages(min(request.num_tokens + view.page_size, request.max_total_tokens))
        slots[part] -= 1
        if free[part] < 0 or slots[part] < 0:
            return False
    return True
