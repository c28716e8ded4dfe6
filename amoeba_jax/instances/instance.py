"""Instance: a serving replica with a view of the weights, a part of the KV cache, and running sequences."""

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

    SERVING: the instance launches steps.
    DRAINING: the instance waits until the launched steps have ended. Until then, the instance launches no further step.
    CHANGING: layers of the instance move to other homes (device groups), and the instance launches steps meanwhile.
    PAUSED: the instance keeps its requests while another instance serves on its devices.
    LOST: the devices of the instance are out of service.
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
"""Phases that may follow each phase. `Instance.enter` checks this."""


class PageCounts(NamedTuple):
    """Numbers of KV pages of an instance.

    Attributes:
        total: number of all pages.
        available: number of pages that are free or can be evicted: free pages plus `cached`.
        cached: number of pages that the prefix cache keeps although no sequence uses them.
    """

    total: int
    available: int
    cached: int


class Instance:
    """Serving replica: runs sequences on one device or a group of devices. Used by the dispatcher thread only.

    Args:
        runner: launcher of the steps of the instance.
        allocators: page allocators of each home (device group), one for each rank of the home.
        lanes: sets of sequences that travel through the layers together (`Lane`).
        released: degree whose weights each device keeps. The memory of other weights is KV cache. With 1, each device
            keeps all weights.
        width: the instance runs up to `max_num_seqs * width` sequences at once.

    Attributes:
        buckets: step shapes of the instance.
        phase: present phase. `enter` changes the phase.
        attention_degree: degree of the attention. With data-parallel attention, this degree is below `tp`.
        pending: launched steps whose results the host has not taken.
        num_launched: number of steps launched so far.
        transition: object that moves layers to other homes (package `transform`). None: no layers move.
        pace: durations of recent steps.
        turns: order in which prompts are computed.
        batch_limit: maximum number of running sequences. None: the maximum is `max_num_seqs * width`.
        paused: instances that are paused because this instance serves on their devices.
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
        """Change the phase. Raises `AssertionError` if the new phase must not follow the present phase."""
        if phase is self.phase:
            return
        assert phase in NEXT_PHASES[self.phase], f"instance {self.id} must not go from {self.phase} to {phase}"
        logger.debug("instance %d (TP%d): %s -> %s", self.id, self.tp, self.phase, phase)
        self.phase = phase
        for sequence in self.running:
            sequence.paused = phase is Phase.PAUSED

    @property
    def is_spread(self) -> bool:
        """Whether modules of the instance are at several homes (device groups). False during a merge or split."""
        placement = self.runner.placement
        return placement.home is None and (self.transition is None or not self.transition.changes_degree)

    @property
    def has_parallel_attention(self) -> bool:
        """Whether the instance has data-parallel attention (`Placement.parallel_attention`).

        In that case, parts of the instance's device group compute the attention of different sequences.
        """
        return self.attention_degree < self.tp

    @property
    def devices(self) -> set[int]:
        """Indices of all devices of the instance. While layers move, the old and new devices are included."""
        return {device for home in self.runner.sites for device in home.devices}

    @property
    def tp(self) -> int:
        return self.group.tp

    @property
    def site(self) -> Site:
        """Site (buffers) of the home (device group) that computes the embedding and the head.

        If all modules of the instance are at one home, this site has the KV cache of all layers.
        """
        return self.runner.sites[self.runner.placement.head]

    @property
    def lane(self) -> Lane:
        """The only lane (set of sequences) of the instance. Raises `ValueError` if there are several lanes."""
        (lane,) = self.lanes
        return lane

    @property
    def lane_buckets(self) -> Buckets:
        """Step shapes for the sequences of one lane. The shapes are the same for all lanes."""
        return self.runner.plan.buckets(max(1, self.width // len(self.lanes)))

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens that fit in the KV cache of the instance, if no page is in use and no change is in progress.

        If modules are at several homes, the number is for the lane with the most pages.
        """
        if self.is_spread:
            return max(lane.capacity_tokens for lane in self.lanes)
        return self.page_counts().total * self.lanes[0].pages.geometry.page_size

    # Sequences

    @property
    def running(self) -> list[Sequence]:
        """Running sequences of all lanes."""
        if len(self.lanes) == 1:
            return self.lanes[0].running
        return [sequence for lane in self.lanes for sequence in lane.running]

    @property
    def max_running(self) -> int:
        """Maximum number of sequences that may run at once.

        This is `max_num_seqs * width`, or `batch_limit` if that is lower.
        """
        most = self.buckets.max_num_seqs
        return most if self.batch_limit is None else min(most, self.batch_limit)

    def limit_batch(self, size: int | None) -> None:
        """Set `batch_limit`, the maximum number of running sequences, and divide the limit evenly among the lanes.

        While layers move to other homes, only `batch_limit` is set. The lanes get their limits when the move has ended.
        """
        self.batch_limit = size
        if self.transition is None:
            for lane in self.lanes:
                lane.max_running = max(1, self.max_running // len(self.lanes))

    @property
    def num_free_slots(self) -> int:
        """Number of further sequences that could run now, given the free slots and `max_running`."""
        return max(min(self.max_running - len(self.running), len(self._free_slots)), 0)

    def lane_of(self, sequence: Sequence) -> Lane:
        """Return the lane of a running sequence."""
        if len(self.lanes) == 1:
            return self.lanes[0]
        return next(lane for lane in self.lanes if sequence in lane.running)

    def free_slots(self, slots: Iterable[int]) -> None:
        """Free the slots of sequences that have moved to another instance. Their pages have moved too."""
        self._free_slots += slots

    def add(self, sequence: Sequence, lane: Lane, *, remember: bool = True) -> None:
        """Give a slot to a sequence that has pages, and add the sequence to a lane. The sequence then runs.

        If `remember`, first write the sequence's row of the sampling state (`StepSampler.remember`). If the write
        fails, its error is raised, and the sequence has no slot and is not in the lane.
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
        """Reserve pages until a sequence has room for `num_tokens` tokens. Return an empty collection on success.

        If too few pages are free, return candidates for preemption. The caller must preempt one candidate and call
        again. The candidates are the paused sequences in the same memory that have the same or a lower priority. If
        there are none, the candidates are the running sequences in the same memory, including `sequence`.
        """
        assert sequence.pages is not None
        lane = self.lane_of(sequence)
        try:
            lane.cache.reserve(sequence.pages, num_tokens)
        except OutOfPagesError:
            needed = sequence.pages.num_lacking(num_tokens)
            if len(self.lanes) > 1:
                # Either the pages of this lane only are used up, or the pages that all lanes share.
                return lane.running if lane.lacks_own_pages(needed, self.lanes) else self.running
            if self._paused_pages is not None:
                holders = [s for s in self._paused_pages.holders(needed) if s.rank >= sequence.rank]
                return holders or lane.running
            return lane.running
        return ()

    def remove(self, sequence: Sequence) -> None:
        """Remove a running sequence from the instance, and release the sequence's pages.

        Pages that are also in the prefix cache stay there until their memory is needed.
        """
        lane = self.lane_of(sequence)
        self.leave(sequence, lane)
        sequence.slot = -1
        assert sequence.pages is not None
        lane.cache.release(sequence.pages)
        sequence.pages = None

    def leave(self, sequence: Sequence, lane: Lane) -> None:
        """Remove a sequence from a lane and free the sequence's slot. The sequence keeps its pages."""
        lane.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.paused = False

    def page_counts(self) -> PageCounts:
        """Return how many pages the instance has, and how many of them are available or cached.

        A page counts once, although each rank has a part of the page. If the modules are at several homes, the numbers
        are for the lane with the most available pages.
        """
        cached = sum(lane.cache.num_evictable_pages for lane in self.lanes)
        if self.is_spread:
            lane = max(self.lanes, key=lambda lane: lane.cache.num_available_pages)
            total = lane.pages.num_total_pages  # lanes may share devices, and their cached pages there
            return PageCounts(total, min(lane.pages.num_free_pages + cached, total), min(cached, total))
        lane = self.lanes[0]
        ranks = lane.ranks[self.runner.placement.head]
        if self._paused_pages is None:
            free = min(lane.pages.free_by_rank()[ranks])
        else:
            free = self._paused_pages.num_free_pages()
        return PageCounts(min(lane.pages.total_by_rank()[ranks]), free + cached, cached)

    def requeue_all(self, requeue: Callable[["Instance", Sequence], None]) -> None:
        """Put all sequences back into the queue, because the KV cache is lost.

        Sequences of paused instances are included. The results of launched steps are dropped. The paused instances are
        retired.

        Args:
            requeue: function that takes a sequence off its instance and puts the sequence into the queue.
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
        """Pause the instances `members`, so that this instance can serve on their devices.

        Paused sequences keep their slots and pages. If this instance needs pages, it evicts cached prefixes of the
        paused instances.

        This instance uses the sampling state of `members[0]`, because both have the same first device. The slots of the
        paused sequences of `members[0]` are therefore not free here.
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
        """End the pause of all paused instances, and return these instances. Afterwards, `paused` is empty.

        The returned instances may serve again.
        """
        members, self.paused, self._paused_pages = self.paused, (), None
        for lane in self.lanes:
            lane.cache.lender = None
        for member in members:
            member.enter(Phase.SERVING)
        return members

    @property
    def paused_sequences(self) -> list[Sequence]:
        """Sequences of all paused instances."""
        return [sequence for member in self.paused for sequence in member.running]

    def paused_victims(self, num_pages: int, rank: tuple[int, int]) -> list[Sequence]:
        """Return the paused sequences that must be preempted to make `num_pages` pages available.

        Only sequences whose sort key `Sequence.rank` is at least `rank` are chosen. The result is empty if they do not
        suffice, or if enough pages are available already.
        """
        if self._paused_pages is None:
            return []
        return self._paused_pages.victims(num_pages - self.lane.cache.num_evictable_pages, rank)

    # Steps

    def clear_pending(self) -> None:
        """Drop all pending steps, because their results are lost."""
        clear_in_flight(row for step in self.pending for row in step.sampled)
        for step in self.pending:
            step.drop()
        self.pending.clear()

    def retire(self) -> None:
        """Drop all device buffers except the KV cache, and end the reader thread.

        If steps are pending, the reader thread first reads their results. In that case, the call waits until the thread
        has ended.
        """
        self.transition = None
        self.reader.close(wait=bool(self.pending))
        del self.sampler, self.runner

    def close(self) -> None:
        """Drop all device buffers, including the KV cache and the buffers of paused instances."""
        for member in self.drop_paused():
            member.close()
        for site in self.runner.sites.values():
            site.kv.clear()
        self.reader.close(wait=True)  # its thread keeps the last result for a moment after it has set the future
        self.retire()
