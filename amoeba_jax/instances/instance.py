"""Instance: one serving replica, with its running sequences, page allocators and launched steps."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from enum import StrEnum
from typing import Any, NamedTuple

from amoeba_jax.instances.batcher import PromptTurns
from amoeba_jax.instances.lane import Lane, SharedPages
from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.runner import Runner
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.site import Site
from amoeba_jax.instances.step import PendingStep, clear_in_flight
from amoeba_jax.programs.buckets import Buckets
from kvcache.allocator import BuddyAllocator, OutOfPagesError
from sharding.placement import Home

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """Phase of an instance.

    SERVING: the instance launches steps, and no layer of the instance changes its home (device group).
    DRAINING: the instance launches no steps until all steps in flight have ended.
    CHANGING: the instance launches steps, and layers of the instance switch to other homes.
    PAUSED: the instance launches no steps but keeps its requests. Another instance serves on the same devices.
    LOST: a failure has ended the instance. Its devices are out of service until a new instance serves on them.
    """

    SERVING = "serving"
    DRAINING = "draining"
    CHANGING = "changing"
    PAUSED = "paused"
    LOST = "lost"


NEXT_PHASES = {
    Phase.SERVING: {Phase.DRAINING, Phase.CHANGING, Phase.PAUSED, Phase.LOST},
    Phase.DRAINING: {Phase.SERVING, Phase.LOST},
    Phase.CHANGING: {Phase.SERVING, Phase.DRAINING, Phase.LOST},
    Phase.PAUSED: {Phase.SERVING},
    Phase.LOST: set[Phase](),
}
"""For each phase, the phases that may follow. `Instance.enter` allows no other change of the phase."""


class PageCounts(NamedTuple):
    """Numbers of KV pages of an instance.

    Attributes:
        total: number of all pages, whether in use or not.
        available: number of pages that could be reserved now: free pages plus the pages counted in `cached`.
        cached: number of pages that are in the prefix cache and that no sequence uses. These pages can be evicted.
    """

    total: int
    available: int
    cached: int


class Instance:
    """Serving replica of the model on one device or a group of devices. Only the dispatcher thread uses this object.

    Args:
        runner: launcher of the steps of the instance.
        allocators: for each home (device group), a list of page allocators, one for each rank of the home.
        lanes: list of lanes. The sequences of a lane travel through the layers together.
        released: degree whose weights each device keeps. The memory of all other weights is KV cache. 1: each device
            keeps all weights.
        width: maximum number of running sequences, divided by `max_num_seqs`.

    Attributes:
        id: index of the first device of the instance.
        buckets: step shapes of the instance.
        phase: phase in which the instance is now. Only `enter` changes the phase.
        attention_degree: number of devices that compute the attention of a sequence together. With data-parallel
            attention, this number is lower than `tp`.
        pending: queue of launched steps whose results the host has not taken, oldest first.
        num_launched: number of steps launched so far.
        transition: transition (package `transform`) that switches layers to other homes. None: no transition.
        pace: durations of recent steps.
        turns: order in which steps compute the prompts.
        batch_limit: additional limit on the number of running sequences (`limit_batch`). None: no additional limit.
        paused: instances that are paused so that this instance can serve on their devices.
    """

    def __init__(
        self,
        runner: Runner,
        allocators: Mapping[Home, SequenceOf[BuddyAllocator]],
        lanes: list[Lane],
        *,
        released: int,
        width: int,
    ):
        self.group, self.id = runner.group, runner.group.start
        self.phase = Phase.SERVING
        self.runner, self.sampler, self.reader = runner, runner.sampler, runner.reader
        self.allocators: Mapping[Home, SequenceOf[BuddyAllocator]] = allocators
        self.lanes, self.buckets = lanes, runner.plan.buckets(width)
        self.released, self.width = released, width
        self.attention_degree = runner.placement.attention_degree or self.group.tp
        self.batch_limit: int | None = None
        self.pending: deque[PendingStep] = deque()
        self.num_launched = 0
        self.transition: Any = None
        self.pace, self.turns = Pace(), PromptTurns()
        self._free_slots = list(range(self.sampler.num_slots))[::-1]
        self.paused: tuple[Instance, ...] = ()
        self._paused_pages: SharedPages | None = None

    def enter(self, phase: Phase) -> None:
        """Change the phase. Raises `AssertionError` if `phase` may not follow the present phase (`NEXT_PHASES`)."""
        if phase is self.phase:
            return
        assert phase in NEXT_PHASES[self.phase], f"instance {self.id} must not go from {self.phase} to {phase}"
        logger.debug("instance %d (TP%d): %s -> %s", self.id, self.tp, self.phase, phase)
        self.phase = phase
        for sequence in self.running:
            sequence.paused = phase is Phase.PAUSED

    @property
    def is_spread(self) -> bool:
        """Whether the instance has several homes (device groups) or several microbatches.

        Always False while a transition changes the degree of the instance or of its attention.
        """
        placement = self.runner.placement
        return placement.home is None and (self.transition is None or not self.transition.changes_degree)

    @property
    def has_parallel_attention(self) -> bool:
        """Whether the instance has data-parallel attention (`Placement.parallel_attention`).

        With data-parallel attention, each part of the device group computes the attention of different sequences.
        """
        return self.attention_degree < self.tp

    @property
    def devices(self) -> set[int]:
        """Indices of the devices of the instance. During a transition: the devices of the old and the new placement."""
        return {device for home in self.runner.sites for device in home.devices}

    @property
    def tp(self) -> int:
        return self.group.tp

    @property
    def site(self) -> Site:
        """Site (buffers) of the home (device group) that computes the embedding and the output projection.

        If the instance has only one home, this site has the KV cache of all layers.
        """
        return self.runner.sites[self.runner.placement.head]

    @property
    def lane(self) -> Lane:
        """The only lane (set of sequences) of the instance. Raises `ValueError` if the instance has several lanes."""
        (lane,) = self.lanes
        return lane

    @property
    def lane_buckets(self) -> Buckets:
        """Step shapes for batches with sequences of one lane. These shapes are the same for every lane."""
        return self.runner.plan.buckets(max(1, self.width // len(self.lanes)))

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens that fit in the KV pages of the instance, whether the pages are in use or free.

        If the instance `is_spread` (several homes or microbatches), only the lane with the most pages counts. During a
        transition, fewer tokens may fit, because a page can need memory in both placements.
        """
        if self.is_spread:
            return max(lane.capacity_tokens for lane in self.lanes)
        return self.page_counts().total * self.lanes[0].pages.geometry.page_size

    # Sequences

    @property
    def running(self) -> list[Sequence]:
        """Running sequences of all lanes. If the instance is paused, these are its paused sequences."""
        if len(self.lanes) == 1:
            return self.lanes[0].running
        return [sequence for lane in self.lanes for sequence in lane.running]

    @property
    def max_running(self) -> int:
        """Maximum number of sequences that may run at once: the lower of `max_num_seqs * width` and `batch_limit`."""
        most = self.buckets.max_num_seqs
        return most if self.batch_limit is None else min(most, self.batch_limit)

    def limit_batch(self, size: int | None) -> None:
        """Limit the number of running sequences (`max_running`) to `size`. None: remove this limit.

        Each lane gets an equal share of `max_running`. During a transition, lanes keep their old shares until its end.
        """
        self.batch_limit = size
        if self.transition is None:
            for lane in self.lanes:
                lane.max_running = max(1, self.max_running // len(self.lanes))

    @property
    def num_free_slots(self) -> int:
        """Number of further sequences that may start now, limited by the free slots and by `max_running`."""
        return max(min(self.max_running - len(self.running), len(self._free_slots)), 0)

    def lane_of(self, sequence: Sequence) -> Lane:
        """Return the lane of a running sequence."""
        if len(self.lanes) == 1:
            return self.lanes[0]
        return next(lane for lane in self.lanes if sequence in lane.running)

    def free_slots(self, slots: Iterable[int]) -> None:
        """Mark slots as free. Call this method after the sequences in these slots have moved to another instance."""
        self._free_slots += slots

    def add(self, sequence: Sequence, lane: Lane, *, remember: bool = True) -> None:
        """Give a slot to a sequence that already has pages, and add the sequence to a lane. The sequence then runs.

        If `remember` is True, first write the sampling settings of the sequence to the slot (`StepSampler.remember`).
        If this write fails, raise the error of the write. The sequence then gets no slot and does not join the lane.
        """
        slot = self._free_slots.pop()
        try:
            if remember:
                self.sampler.remember(sequence, slot)
        except BaseException:
            self._free_slots.append(slot)
            raise
        sequence.slot = slot
        lane.running.append(sequence)

    def reserve(self, sequence: Sequence, num_tokens: int) -> Collection[Sequence]:
        """Reserve pages so that a sequence has room for `num_tokens` tokens. Return an empty collection on success.

        If too few pages are available, reserve nothing, and return candidates for preemption. The caller must preempt
        one candidate, and call again. The candidates are paused sequences that use a rank without enough pages, and
        that do not have a higher priority (`Sequence.rank`) than `sequence`. If there are no such sequences, or if the
        instance has several lanes, the candidates are running sequences, including `sequence` itself.
        """
        assert sequence.pages is not None
        lane = self.lane_of(sequence)
        try:
            lane.cache.reserve(sequence.pages, num_tokens)
        except OutOfPagesError:
            needed = sequence.pages.num_lacking(num_tokens)
            if len(self.lanes) > 1:
                # If a rank that only this lane uses lacks pages, only sequences of this lane can free pages there.
                return lane.running if lane.lacks_own_pages(needed, self.lanes) else self.running
            if self._paused_pages is not None:
                holders = [s for s in self._paused_pages.holders(needed) if s.rank >= sequence.rank]
                return holders or lane.running
            return lane.running
        return ()

    def remove(self, sequence: Sequence) -> None:
        """Remove a running sequence from the instance. Free the slot and release the pages of the sequence.

        Pages that are in the prefix cache stay cached until they are evicted.
        """
        lane = self.lane_of(sequence)
        self.leave(sequence, lane)
        sequence.slot = -1
        assert sequence.pages is not None
        lane.cache.release(sequence.pages)
        sequence.pages = None

    def leave(self, sequence: Sequence, lane: Lane) -> None:
        """Remove a sequence from a lane and free the sequence's slot. The caller must update `Sequence.slot`.

        The sequence keeps its pages.
        """
        lane.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.paused = False

    def page_counts(self) -> PageCounts:
        """Return the numbers of all pages, of available pages and of cached pages of the instance.

        A page that is divided among ranks counts once. `cached` counts the unused cached pages of all lanes.
        `available` is the number of free pages plus `cached`.

        If the instance `is_spread` (several homes or microbatches), `total` and the free pages are the pages of only
        one lane: the lane that can reserve the most pages now. `cached` still counts all lanes, because lanes that
        share memory can evict each other's cached pages. `cached` and `available` are limited to `total`.
        """
        cached = sum(lane.cache.num_evictable_pages for lane in self.lanes)
        if self.is_spread:
            lane = max(self.lanes, key=lambda lane: lane.cache.num_available_pages)
            total = lane.pages.num_total_pages  # other lanes may also have cached pages there
            return PageCounts(total, min(lane.pages.num_free_pages + cached, total), min(cached, total))
        lane = self.lanes[0]
        ranks = lane.ranks[self.runner.placement.head]
        if self._paused_pages is None:
            free = min(lane.pages.free_by_rank()[ranks])
        else:
            free = self._paused_pages.num_free_pages()
        return PageCounts(min(lane.pages.total_by_rank()[ranks]), free + cached, cached)

    def requeue_all(self, requeue: Callable[["Instance", Sequence], None]) -> None:
        """Move all sequences of this instance and of its paused instances to the queue, because the KV cache is lost.

        Empty and disable the prefix caches, drop the results of launched steps, and retire the paused instances.

        Args:
            requeue: function that removes a sequence from the given instance, and adds the sequence to the queue.
        """
        paused = self.drop_paused()
        for each in (self, *paused):
            each.clear_pending()
            for lane in each.lanes:
                lane.cache.clear()
                lane.cache.enabled = False
            for sequence in list(each.running):
                requeue(each, sequence)
        for each in paused:
            each.retire()

    # Paused instances

    def take_the_place_of(self, members: "tuple[Instance, ...]") -> None:
        """Pause the instances `members`, so that this instance can serve on the devices of `members`.

        Paused sequences keep their slots and pages. If this instance needs pages, cached prefixes of the paused
        instances are evicted.

        Both this instance and `members[0]` use the sampling state of their common first device. Therefore, the slots of
        the sequences of `members[0]` are not free for this instance.
        """
        for member in members:
            member.enter(Phase.PAUSED)
        kept = {sequence.slot for sequence in members[0].running}
        self._free_slots = [slot for slot in self._free_slots if slot not in kept]
        self.lane.max_running = min(self.lane.max_running, len(self._free_slots) + len(self.running))
        self.paused = members
        self._paused_pages = SharedPages(self.lane.pages, [member.lane for member in members])
        self.lane.cache.lender = self._paused_pages

    def drop_paused(self) -> "tuple[Instance, ...]":
        """Move all instances in `paused` to the phase `SERVING`, empty `paused`, and return the instances."""
        members, self.paused, self._paused_pages = self.paused, (), None
        for lane in self.lanes:
            lane.cache.lender = None
        for member in members:
            member.enter(Phase.SERVING)
        return members

    @property
    def paused_sequences(self) -> list[Sequence]:
        """Sequences of all instances in `paused`."""
        return [sequence for member in self.paused for sequence in member.running]

    def paused_victims(self, num_pages: int, rank: tuple[int, int]) -> list[Sequence]:
        """Return paused sequences to preempt, so that `num_pages` pages become available.

        Only sequences whose `Sequence.rank` is at least `rank` are chosen: sequences of an equal or lower priority.
        Return an empty list if these sequences do not have enough pages, or if enough pages are available without
        preemption.
        """
        if self._paused_pages is None:
            return []
        return self._paused_pages.victims(num_pages - self.lane.cache.num_evictable_pages, rank)

    # Steps

    def clear_pending(self) -> None:
        """Drop all steps in `pending` and all tokens that these steps sample. Call this if the results are lost."""
        clear_in_flight(row for step in self.pending for row in step.sampled)
        for step in self.pending:
            step.drop()
        self.pending.clear()

    def retire(self) -> None:
        """Drop all device buffers of the instance except the KV cache, and end the reader thread.

        If steps are pending, wait until the reader thread has read their results and has ended.
        """
        self.transition = None
        self.reader.close(wait=bool(self.pending))
        del self.sampler, self.runner

    def close(self) -> None:
        """Drop all device buffers of this instance and of its paused instances, including the KV cache."""
        for member in self.drop_paused():
            member.close()
        for site in self.runner.sites.values():
            site.kv.clear()
        self.reader.close(wait=True)  # the reader thread may still hold the last result for a moment
        self.retire()
