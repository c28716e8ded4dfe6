"""Simulated instance with its running requests and its steps.

Steps are planned in blocks: a block is a series of similar steps (`block.Block`). A step generates one token for each
decoding request, and computes chunks of prompts.
"""

import heapq
from dataclasses import dataclass

from serving.scheduler import DegreeLimits, InstanceView, RunningRequest, ScaleDown, ScaleUp
from serving.simulator.block import Block
from serving.simulator.prefix_store import PrefixStore
from serving.simulator.pricing import Pricing
from serving.simulator.run import Run
from serving.simulator.spread import Spread
from serving.simulator.step_cost import StepShape
from serving.simulator.tally import Records, Tally


@dataclass(eq=False)
class Change:
    """Merge or split that is in progress. Before each step, some layers switch to the new tensor-parallel degree.

    Attributes:
        action: requested merge or split.
        start_s: start of the merge or split.
        left: number of layers that have not switched.
        total: number of layers.
        lower: lower of the old and the new degree. For a merge, it is the lowest degree of the merged instances.
        layer_s: seconds to switch one layer.
        pause_s: seconds without steps before the first switch.
        layers_per_step: number of layers that switch before each step.
        fails: whether the merge or split ends without effect.
        from_degree: old degree. For a merge, it is the same as `lower`.
        lane_tokens: capacity in tokens of an instance of the lower degree.
    """

    action: ScaleUp | ScaleDown
    start_s: float
    left: int
    total: int
    lower: int
    layer_s: float
    pause_s: float
    layers_per_step: int
    fails: bool = False
    from_degree: int = 1
    lane_tokens: int = 0

    def joinable_tokens(self, instance: "SimInstance", used_tokens: int) -> int:
        """Return the maximum length in tokens of a prompt that can start on the instance now.

        The prompt must fit in the free memory of one instance of the lower degree. The result is a multiple of the page
        size. It is 0 if `fails` is set.

        Args:
            instance: instance that merges or splits.
            used_tokens: number of tokens of the running requests. The calculation assumes that these tokens are spread
                evenly over the instances of the lower degree.
        """
        if self.fails:
            return 0
        lanes, size = instance.degree // self.lower, instance.page_size
        used_tokens += size * len(instance.runs)  # Each request needs one more page for its next tokens.
        free = min(self.lane_tokens - -(-used_tokens // lanes), instance.room_tokens - used_tokens)
        return max(free // size * size, 0)

    def step(self, instance: "SimInstance", now_s: float) -> Block:
        """Return the next step, as a block of one step. Before this step, `layers_per_step` layers switch.

        Switched layers run at the new degree, and all other layers run at the old degree. The step computes a chunk of
        at most one prompt. If no request runs, all remaining layers switch before this step.
        """
        count, prompts = instance.num_decoding, instance.prompts
        switches = min(self.layers_per_step, self.left) if count or prompts else self.left
        switch_s = switches * self.layer_s + (self.pause_s if self.left == self.total else 0.0)
        done = 1 - (self.left - switches / 2) / self.total
        low_share = done if isinstance(self.action, ScaleDown) else 1 - done
        decodes_s = self._step_s(instance, low_share, 0, 0) * instance.slowdown if count else 0.0
        step_s, chunks = decodes_s, []
        if prompts:
            (length,) = instance.pricing.batching.chunks([prompts[0].prompt_left], count, instance.degree)
            chunks = [(prompts[0], length)]
            step_s = self._step_s(instance, low_share, length, instance.pricing.pairs(prompts[0].computed, length))
            step_s *= instance.prompt_slowdown
        block = Block(now_s, 1, step_s + switch_s)
        block.chunks, block.interference_s = chunks, max(step_s - decodes_s, 0.0) if count else 0.0
        block.plain_s, block.switches, block.switch_s = decodes_s, switches, switch_s
        return block

    def _step_s(self, instance: "SimInstance", low_share: float, chunk: int, pairs: float) -> float:
        """Return the seconds of a step in which the share `low_share` of the layers runs at the lower degree.

        `chunk` is the number of prompt tokens of the step. `pairs` is the number of attention pairs. A pair is one of
        these prompt tokens and a token that it attends to.
        """
        pricing, count, degree = instance.pricing, instance.num_decoding, instance.degree
        seconds = []
        for at, share in ((self.lower, low_share), (degree, 1 - low_share)):
            members = degree // at
            shape = StepShape(-(-count // members), int(chunk > 0), chunk, chunk)
            whole_s = pricing.fixed_s(at, shape) + pricing.attention_s(at, count / members, instance.context / members)
            seconds.append(share * (whole_s + pricing.pair_s(at) * pairs))
        return sum(seconds)


class SimInstance:
    """Simulated instance with its running requests and its planned steps. An instance without planned steps is idle.

    Attributes:
        runs: running requests by id.
        joining: added requests that are not in `prompts` yet.
        prompts: requests whose prompts the next steps compute, in the order of `Run.order`.
        num_decoding: number of decoding requests.
        steps: number of decode steps that have ended.
        context: total number of tokens of all decoding requests.
        block: planned steps. None: the instance is idle.
        change: running merge or split, if any.
        paused: paused instances that this instance replaces on the same devices. The requests of the paused instances
            make no progress and keep their pages.
        room_tokens: maximum number of tokens of all running requests: the capacity less the pages of paused requests.
        max_requests: maximum number of running requests. Paused requests reduce this number.
        ready_s: earliest start of the next step.
        paused_s: time at which the instance was last paused.
        step_s: seconds of the latest decode step without a prompt. None: there was no such step.
        step_rows: number of sequences in the step that `step_s` measures.
        prompt_tokens_per_s: prompt tokens per second of the latest step with prompts. None: there was no such step.
        waits_for: merge of this instance that waits until the merging instances run no requests, or None.
        slowdown: factor by which steps take longer because other instances are busy (`Pricing.slowdown`).
        prompt_slowdown: like `slowdown`, for steps with a prompt.
        down_until_s: time until which the instance accepts no requests after a failure. Below 0: no failure.
        prefixes: prefix cache.
        step_began_s: start of the latest step that has ended.
        spread: devices that compute the layers of the instance. None: only the instance's own devices compute them, and
            these devices compute no layers of other instances.
        changes_placement: whether a placement change of the instance is in progress.
        device_crowding: factor by which other busy instances slow down each device of `spread`.
        batch_limit: maximum number of running requests, if a policy has set one, otherwise None.
        version: number of changes of `block`. Events for an older version are obsolete.
    """

    __slots__ = (
        "_busy_s", "_ends", "_idle_view", "_taken_busy_s", "batch_limit", "block", "change", "changes_placement",
        "context", "degree", "device_crowding", "devices", "down_until_s", "joining", "launches_ahead", "limits",
        "max_requests", "num_decoding", "page_size", "paused", "paused_s", "prefixes", "pricing", "prompt_slowdown",
        "prompt_tokens_per_s", "prompts", "ready_s", "records", "room_tokens", "runs", "slowdown", "spread",
        "step_began_s", "step_rows", "step_s", "steps", "tally", "version", "waits_for",
    )  # fmt: skip

    def __init__(
        self,
        devices: tuple[int, ...],
        limits: DegreeLimits,
        pricing: Pricing,
        page_size: int,
        records: Records,
        tally: Tally,
        launches_ahead: bool = False,
    ):
        self.launches_ahead = launches_ahead
        self.devices, self.degree, self.limits = devices, len(devices), limits
        self.pricing, self.page_size, self.records, self.tally = pricing, page_size, records, tally
        self.runs: dict[str, Run] = {}
        self.joining: list[Run] = []
        self.prompts: list[Run] = []
        self.num_decoding = self.context = self.steps = self.version = 0
        self._ends: list[tuple[int, int, Run]] = []
        self.block: Block | None = None
        self.change: Change | None = None
        self.prefixes = PrefixStore()
        self.down_until_s = -1.0
        self.slowdown = self.prompt_slowdown = 1.0
        self._idle_view: InstanceView | None = None
        self.paused: tuple[SimInstance, ...] = ()
        self.room_tokens, self.max_requests = limits.capacity_tokens, limits.max_requests
        self.ready_s = self.paused_s = self.step_began_s = -1.0
        self.step_s: float | None = None
        self.step_rows = 0
        self.prompt_tokens_per_s: float | None = None
        self.waits_for: ScaleUp | None = None
        self.spread: Spread | None = None
        self.changes_placement = False
        self.device_crowding: dict[int, float] = {}
        self.batch_limit: int | None = None
        self._busy_s = self._taken_busy_s = 0.0

    # Room

    @property
    def capacity_tokens(self) -> int:
        return self.limits.capacity_tokens

    @property
    def has_paused(self) -> bool:
        """Whether paused requests have pages on the devices of this instance."""
        return bool(self.paused) and any(member.runs for member in self.paused)

    def count_room(self) -> None:
        """Update `room_tokens`, the number of tokens that running requests may use.

        Without paused instances, this is the capacity. With paused instances, it is the free tokens of the fullest
        paused instance, times the number of paused instances, because a page needs memory on all devices. For two
        paused instances with 100 and 40 free tokens, it is 80.
        """
        free = min((m.capacity_tokens - m.used_tokens() for m in self.paused), default=None)
        self.room_tokens = self.capacity_tokens if free is None else free * len(self.paused)

    def used_tokens(self, steps: int | None = None) -> int:
        """Return the size in tokens of the KV pages that running requests use. A page in use counts as full.

        The result is the size after the instance has run `steps` decode steps in total. None: `self.steps`.
        """
        steps, size = self.steps if steps is None else steps, self.page_size
        return sum(-(-run.num_tokens(steps) // size) for run in self.runs.values()) * size

    def steps_at(self, now_s: float) -> int:
        """Return the number of decode steps that have ended at `now_s`, including ended steps of the present block."""
        return self.steps if self.block is None or self.num_decoding == 0 else self.steps + self.block.done(now_s)

    # Requests

    def requests_at(self, steps: int) -> tuple[RunningRequest, ...]:
        """Return the running requests after `steps` decode steps, in the form that policies use."""
        return tuple([run.view(steps) for run in self.runs.values()])

    def add(self, run: Run) -> None:
        """Add a request. One of the next steps will begin to compute its prompt.

        Prompt tokens in the prefix cache count as computed.
        """
        if run.blocks is not None:
            self.prefixes.shrink(self.room_tokens - self.used_tokens())
            found = self.prefixes.find(run.blocks, run.request.prompt_tokens)
            run.prompt_left -= found
            self.records.prefix_tokens[run.index] += found
            self.tally.prefix_tokens += found
        self.runs[run.request.request_id] = run
        self.joining.append(run)

    def take_over(self, runs: dict[str, Run], steps: int) -> None:
        """Add running requests of another instance, with their KV pages, after a merge or split.

        `steps` is the number of decode steps that have ended on the other instance.
        """
        for name, run in runs.items():
            self.runs[name] = run
            if run.blocks is not None:
                self.prefixes.take_held(run.blocks)
            if run.base:
                run.output_left -= steps - run.joined
                run.start_decoding(run.num_tokens(steps), self.steps)
                self._decode(run)
            elif run.prompt_left:
                self.joining.append(run)

    def remove(self, run: Run) -> None:
        """Remove a request and its KV pages. The caller must first process all ended steps (`end_block`)."""
        self._forget(run)
        if run.base:
            self.num_decoding -= 1
            self.context -= run.num_tokens(self.steps)
            self._ends = [entry for entry in self._ends if entry[2] is not run]
            heapq.heapify(self._ends)
        else:
            self.joining = [other for other in self.joining if other is not run]
            self.prompts = [other for other in self.prompts if other is not run]

    def _forget(self, run: Run) -> None:
        if run.blocks is not None:
            self.prefixes.shrink(self.room_tokens - self.used_tokens())
            self.prefixes.release(run.blocks)
        del self.runs[run.request.request_id]

    def last_in_order(self) -> Run:
        """Return the running request to preempt first: the last one in the order `Run.order`."""
        return max(self.runs.values(), key=lambda run: run.order)

    def _decode(self, run: Run) -> None:
        self.num_decoding += 1
        self.context += run.num_tokens(self.steps)
        heapq.heappush(self._ends, (self.steps + run.output_left, run.index, run))

    # Steps

    def begin(self, now_s: float) -> Block | None:
        """Plan the next steps, and return a block of these steps that starts now. Return None if no step is needed.

        Added requests join before the steps are planned (`_take_joining`). Before the call, the caller must check that
        there are enough KV pages (`pages_short`).
        """
        self._take_joining()
        if self.change is not None and not self.change.fails:
            self.block = self.change.step(self, now_s)
        elif self.prompts:
            self.block = self._mixed_step(now_s)
        elif self.num_decoding:
            self.block = self._decode_steps(now_s)
        else:
            self.block = None
        self.version += 1
        return self.block

    def _take_joining(self) -> None:
        """Move added requests from `joining` to `prompts`, so that the next step can compute their prompts.

        With `launches_ahead`, a busy instance launches each step when the step before it begins. A request that is
        added during step 1 is then too late for step 2. It stays in `joining` until step 3 is planned.
        """
        came = self.joining
        if self.launches_ahead and (self.prompts or self.num_decoding):
            came = [run for run in came if run.added_s <= self.step_began_s]
        if came:
            self.prompts = sorted([*self.prompts, *came], key=lambda run: run.order)
            self.joining = [run for run in self.joining if run not in came]

    def _step_s(self, shape: StepShape, pairs: float = 0.0) -> float:
        """Return the seconds of a step, before the factor `slowdown` is applied.

        `pairs` is the number of attention pairs. A pair is a prompt token of the step and a token that it attends to.
        """
        pricing, degree = self.pricing, self.degree
        if self.spread is not None:
            return self.spread.step_s(pricing, shape, self.context, pairs, self.device_crowding)
        attention_s = pricing.attention_s(degree, self.num_decoding, self.context)
        return pricing.fixed_s(degree, shape) + attention_s + pricing.pair_s(degree) * pairs

    def _mixed_step(self, now_s: float) -> Block:
        pricing, degree, decodes = self.pricing, self.degree, self.num_decoding
        chunks = pricing.batching.chunks([run.prompt_left for run in self.prompts], decodes, degree)
        shape = StepShape(decodes, len(chunks), sum(chunks), max(chunks))
        pairs = sum(pricing.pairs(run.computed, n) for run, n in zip(self.prompts, chunks, strict=False))
        block = Block(now_s, 1, self._step_s(shape, pairs) * self.prompt_slowdown)
        block.chunks = list(zip(self.prompts, chunks, strict=False))
        if decodes:
            plain_s = self._step_s(StepShape(decodes)) * self.slowdown
            block.plain_s = plain_s
            block.interference_s = max(block.first_s - plain_s, 0.0)
        return block

    def _decode_steps(self, now_s: float) -> Block:
        pricing, count = self.pricing, self.num_decoding
        slope_s = pricing.attention_slope_s(self.degree, count, self.context)
        steps = min(self._ends[0][0] - self.steps, steps_with_pages(self))
        if self.spread is not None:
            slope_s = self.spread.slope_s(pricing, count, self.context, self.device_crowding)
            steps = min(steps, self.page_size)  # Other instances may slow this one down, or use the same memory.
        if pricing.crowding or self.joining:
            steps = 1  # After each step, other instances may change the speed, and requests may join.
        return Block(now_s, max(steps, 1), self._step_s(StepShape(count)) * self.slowdown, slope_s * self.slowdown)

    def end_block(self, now_s: float) -> list[Run]:
        """Process all planned steps. The last step ends at `now_s`. The instance is idle afterwards.

        Return the finished requests. They and their KV pages are removed from the instance.
        """
        block, self.block = self.block, None
        if block is None or block.steps == 0:
            return []
        steps, count, tally, finished = block.steps, self.num_decoding, self.tally, []
        tally.steps += steps
        self._busy_s += block.time_s(steps)
        self.step_began_s = block.start_s + block.time_s(steps - 1)
        if count:
            if not block.chunks and not block.switches:
                self.step_s, self.step_rows = block.first_s + block.slope_s * (steps - 1), count
            self.steps += steps
            self.context += count * steps
            tally.add_block(block, count, now_s)
            while self._ends and self._ends[0][0] <= self.steps:
                run = heapq.heappop(self._ends)[2]
                self.num_decoding -= 1
                self.context -= run.num_tokens(self.steps)
                finished.append(run)
        if block.chunks and not block.switches:
            self.prompt_tokens_per_s = sum(length for _, length in block.chunks) / max(block.first_s, 1e-9)
        for run, length in block.chunks:
            if self.runs.get(run.request.request_id) is run:
                self._computed(run, length, now_s, finished)
        if self.change is not None:
            self.change.left -= block.switches
        for run in finished:
            self._forget(run)
        return finished

    def _computed(self, run: Run, length: int, now_s: float, finished: list[Run]) -> None:
        """Record that a chunk of `length` prompt tokens of a request was computed.

        The last chunk of a prompt also generates a token. If this token is also the last token of the request, append
        the request to `finished`.
        """
        run.prompt_left -= length
        self.tally.prompt_tokens += length
        if run.prompt_left:
            return
        self.prompts.remove(run)
        if run.blocks is not None:
            self.prefixes.add(run.blocks)
        records, index = self.records, run.index
        if run.last_token_s is not None:
            self.tally.add_gaps(now_s - run.last_token_s, 1)
        elif records.first_token_s[index] != records.first_token_s[index]:
            records.first_token_s[index] = now_s + self.pricing.latency_s
        self.tally.add_tokens(now_s, now_s, 1)
        run.output_left -= 1
        run.start_decoding(run.request.prompt_tokens + 1, self.steps)
        if run.output_left <= 0:
            finished.append(run)
        else:
            self._decode(run)

    def take_busy_s(self, now_s: float) -> float:
        """Return the seconds in which steps have run since the last call."""
        total_s, before_s = self._busy_s, self._taken_busy_s
        if self.block is not None:
            total_s += min(max(now_s - self.block.start_s, 0.0), self.block.time_s(self.block.steps))
        self._taken_busy_s = total_s
        return total_s - before_s

    def cut(self, now_s: float) -> bool:
        """Drop the planned steps that have not begun. Return whether a step was dropped."""
        if self.block is None or not self.block.cut(now_s):
            return False
        self.version += 1
        return True


def view_of(instance: SimInstance, now_s: float, shows_timing: bool = False) -> InstanceView:
    """Convert an instance to the form that policies use.

    `shows_timing` says whether the result includes the time of the instance's latest decode step.
    """
    step_s = instance.step_s if shows_timing else None
    is_idle = not instance.runs and instance.change is None and instance.waits_for is None and not instance.has_paused
    is_idle = is_idle and instance.down_until_s < now_s and instance.spread is None and instance.batch_limit is None
    if is_idle and not instance.changes_placement:
        if (view := instance._idle_view) is None or view.step_s != step_s:
            capacity, slots = instance.limits.capacity_tokens, instance.limits.max_requests
            view = InstanceView(instance.devices[0], instance.devices, capacity, capacity, slots, step_s=step_s)
            instance._idle_view = view
        return view
    running = instance.requests_at(instance.steps_at(now_s))
    size, coming = instance.page_size, instance.waits_for if instance.change is None else instance.change.action
    used = sum([-(-r.num_tokens // size) for r in running]) * size
    has_paused = instance.has_paused
    kept = None
    if instance.waits_for is not None and not instance.waits_for.release_weights:
        kept = instance.capacity_tokens * (instance.waits_for.degree // instance.degree)
    return InstanceView(
        instance.devices[0],
        instance.devices,
        instance.capacity_tokens,
        max(instance.room_tokens - used, 0),
        max(instance.max_requests - len(running), 0),
        running,
        None if coming is None else coming.degree,
        coming_tokens=kept,
        joinable_tokens=0 if instance.change is None else instance.change.joinable_tokens(instance, used),
        draining=now_s < instance.down_until_s,
        step_s=step_s,
        paused=tuple(m.requests_at(m.steps) for m in instance.paused) if has_paused else (),
        paused_degree=instance.paused[0].degree if has_paused else None,
        placement=None if instance.spread is None else instance.spread.view,
        changes_placement=instance.changes_placement,
        batch_limit=instance.batch_limit,
    )


def steps_with_pages(instance: SimInstance) -> int:
    """Return a lower bound of the number of decode steps that fit into the free KV pages, or 1 if no step fits."""
    count, size = instance.num_decoding, instance.page_size
    most = instance.context + count * size + sum(run.request.prompt_tokens + size for run in instance.prompts)
    if (room := instance.room_tokens - most) >= 64 * count:
        return room // count
    free = instance.room_tokens - instance.used_tokens()
    return max(free // (count * size) * size, 1)


def pages_short(instance: SimInstance) -> bool:
    """Return whether the next step needs more KV pages than the instance has, so that a request must be preempted.

    If there is only one running or paused request, return False, because its preemption would help no other request.
    """
    count, size = instance.num_decoding, instance.page_size
    if instance.context + (count + len(instance.runs)) * size <= instance.room_tokens and not instance.prompts:
        return False
    used = 0
    for run in instance.runs.values():
        tokens = run.num_tokens(instance.steps)
        used += -(-min(tokens + (1 if run.base else 0), run.request.max_total_tokens) // size)
    return used * size > instance.room_tokens and (len(instance.runs) > 1 or instance.has_paused)
