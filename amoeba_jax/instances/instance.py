"""One serving replica: devices with a view of the weights, a share of the KV cache, and running sequences."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from enum import StrEnum
from typing import Any, NamedTuple

from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.paused import PausedPages
from amoeba_jax.instances.prompt_turns import PromptTurns
from amoeba_jax.instances.result_reader import ResultReader
from amoeba_jax.instances.runner import Runner
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.site import Site
from amoeba_jax.instances.step import PendingStep, clear_in_flight
from amoeba_jax.instances.step_launcher import StepLauncher
from amoeba_jax.instances.step_sampler import StepSampler
from amoeba_jax.programs.buckets import Buckets
from amoeba_jax.programs.executables import Executables
from kvcache.allocator import BuddyAllocator, OutOfPagesError
from sharding.placement import Home

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """Phase of an instance.

    SERVING: launches steps. DRAINING: launches no step until the steps in flight have ended. CHANGING: serves while its
    layers change their homes. PAUSED: keeps its requests while another instance serves on its devices. LOST: its
    devices are out of service.
    """

    SERVING = "serving"
    DRAINING = "draining"
    CHANGING = "changing"
    PAUSED = "paused"
    LOST = "lost"


_NEXT_PHASES = {
    Phase.SERVING: {Phase.DRAINING, Phase.CHANGING, Phase.PAUSED, Phase.LOST},
    Phase.DRAINING: {Phase.SERVING, Phase.CHANGING, Phase.PAUSED, Phase.LOST},
    Phase.CHANGING: {Phase.SERVING, Phase.LOST},
    Phase.PAUSED: {Phase.SERVING, Phase.LOST},
    Phase.LOST: set[Phase](),
}
"""Phases that may follow each phase."""


class PageCounts(NamedTuple):
    """Pages of an instance.

    Attributes:
        available: free pages, and cached pages that no sequence uses.
        cached: cached pages that no sequence uses.
    """

    total: int
    available: int
    cached: int


class Instance:
    """A serving replica. Used by the dispatcher thread only.

    Args:
        runner: launches the programs of its steps, at its placement.
        allocators: page allocators of its devices, by home, one for each rank.
        lanes: its sequences; see `Lane`.
        sampler: samples on its first device.
        reader: reads the results of its steps.
        buckets: its step shapes.
        lane_buckets: step shapes of an instance with one of its lanes.
        released: degree for which shards of its weights are KV extents.
        width: it runs `max_num_seqs * width` sequences.

    Attributes:
        phase: present phase; see `enter`.
        launcher: launches its steps.
        pending: launched steps whose results were not taken.
        num_launched: number of launched steps.
        last_was_prompt: whether its latest step computed a prompt.
        transition: transition that changes the homes of its layers, of the package `transform`; None in steady state.
        pace: durations of its steps.
        turns: order of its prompts.
        batch_limit: most running sequences; None: as many as it has slots.
        paused: instances over its devices whose requests are paused while it serves.
    """

    def __init__(
        self,
        runner: Runner,
        allocators: Mapping[Home, SequenceOf[BuddyAllocator]],
        lanes: list[Lane],
        sampler: StepSampler,
        reader: ResultReader,
        executables: Executables,
        *,
        buckets: Buckets,
        lane_buckets: Buckets,
        released: int,
        width: int,
    ):
        self.group = runner.group
        self.id = self.group.start
        self.phase = Phase.SERVING
        self.runner, self.lanes, self.sampler = runner, lanes, sampler
        self.buckets, self.lane_buckets = buckets, lane_buckets
        self.released, self.width = released, width
        self.batch_limit: int | None = None
        self.allocators: Mapping[Home, SequenceOf[BuddyAllocator]] = allocators
        self.pending: deque[PendingStep] = deque()
        self.num_launched = 0
        self.last_was_prompt = False
        self.transition: Any = None
        self.pace = Pace()
        self.turns = PromptTurns()
        self._free_slots = list(range(sampler.num_slots))[::-1]
        self.paused: tuple[Instance, ...] = ()
        self._paused_pages: PausedPages | None = None
        self.reader, self.launcher = reader, StepLauncher(runner, sampler, reader, executables)

    def enter(self, phase: Phase) -> None:
        """Change the phase. Raises `AssertionError` if the phase must not follow the present one."""
        if phase is self.phase:
            return
        assert phase in _NEXT_PHASES[self.phase], f"instance {self.id} must not go from {self.phase} to {phase}"
        logger.debug("instance %d (TP%d): %s -> %s", self.id, self.tp, self.phase, phase)
        self.phase = phase
        for sequence in self.running:
            sequence.paused = phase is Phase.PAUSED

    @property
    def is_spread(self) -> bool:
        """Whether its modules are at several homes, and no merge or split is the reason."""
        placement = self.runner.placement
        return placement.home is None and (self.transition is None or not self.transition.changes_degree)

    @property
    def devices(self) -> set[int]:
        """Devices of all its homes, also of those to which its layers are about to move."""
        return {device for home in self.runner.sites for device in home.devices}

    @property
    def tp(self) -> int:
        return self.group.tp

    @property
    def site(self) -> Site:
        """Site of the embedding and the head; in steady state, of all layers."""
        return self.runner.sites[self.runner.placement.head]

    @property
    def lane(self) -> Lane:
        """The only lane of an instance in steady state."""
        (lane,) = self.lanes
        return lane

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit in the empty instance in steady state."""
        if self.is_spread:
            return max(lane.capacity_tokens for lane in self.lanes)
        return self.page_counts().total * self.lanes[0].pages.geometry.page_size

    # Sequences

    @property
    def running(self) -> list[Sequence]:
        """The sequences of all lanes."""
        if len(self.lanes) == 1:
            return self.lanes[0].running
        return [sequence for lane in self.lanes for sequence in lane.running]

    @property
    def max_running(self) -> int:
        """Largest number of sequences that it decodes at once."""
        most = self.buckets.max_num_seqs
        return most if self.batch_limit is None else min(most, self.batch_limit)

    def limit_batch(self, size: int | None) -> None:
        """Set `batch_limit`, and divide the sequences among the lanes."""
        self.batch_limit = size
        if self.transition is None:
            for lane in self.lanes:
                lane.max_running = max(1, self.max_running // len(self.lanes))

    @property
    def num_free_slots(self) -> int:
        """Sequences that could run in addition to its running ones."""
        return max(min(self.max_running - len(self.running), len(self._free_slots)), 0)

    def lane_of(self, sequence: Sequence) -> Lane:
        """Return the lane of a running sequence."""
        if len(self.lanes) == 1:
            return self.lanes[0]
        return next(lane for lane in self.lanes if sequence in lane.running)

    def free_slots(self, slots: Iterable[int]) -> None:
        """Free the slots of sequences that have left to another instance with their pages."""
        self._free_slots += slots

    def add(self, sequence: Sequence, lane: Lane, *, remember: bool = True) -> None:
        """Run a sequence that has its pages. If this raises, nothing has changed.

        `remember`: whether to write its row of the sampling state.

        Raises the errors of the sampler's program, or `StateLostError`.
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
        """Reserve pages for `num_tokens` tokens of a sequence.

        Returns nothing if the pages were reserved. Otherwise it returns the sequences that hold the missing pages, with
        this one among them or paused ones only: preempt one and call again.
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
        """Remove a sequence. The prefix cache keeps its cached pages until their memory is needed."""
        lane = self.lane_of(sequence)
        self.leave(sequence, lane)
        sequence.slot = -1
        assert sequence.pages is not None
        lane.cache.release(sequence.pages)
        sequence.pages = None

    def leave(self, sequence: Sequence, lane: Lane) -> None:
        """Remove a sequence that keeps its pages."""
        lane.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.paused = False

    def page_counts(self) -> PageCounts:
        """Return the use of its pages, counted at its own degree. The lane with the most available pages counts."""
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
        """Requeue all sequences, also of paused instances, because the cache is lost. The paused instances retire.

        Args:
            requeue: takes a sequence off its instance and inserts it into the queue.
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
        """Pause instances over the same devices while this one serves.

        Paused sequences keep their slots and pages. This instance samples on its first device and shares the sampling
        state there with `members[0]`, so it uses no slot of a paused sequence of `members[0]`. It evicts cached
        prefixes of the paused instances if it needs their pages.
        """
        for member in members:
            member.enter(Phase.PAUSED)
        kept = {sequence.slot for sequence in members[0].running}
        self._free_slots = [slot for slot in self._free_slots if slot not in kept]
        self.lane.max_running = min(self.lane.max_running, len(self._free_slots) + len(self.running))
        self.paused = members
        self._paused_pages = PausedPages(self.lane.pages, [member.lane for member in members])
        self.lane.cache.lender = self._paused_pages

    def drop_paused(self) -> "tuple[Instance, ...]":
        """End the pause of instances, and return them."""
        members, self.paused, self._paused_pages = self.paused, (), None
        for lane in self.lanes:
            lane.cache.lender = None
        for member in members:
            member.enter(Phase.SERVING)
        return members

    @property
    def paused_sequences(self) -> list[Sequence]:
        """The sequences of paused instances."""
        return [sequence for member in self.paused for sequence in member.running]

    def paused_victims(self, num_pages: int, rank: tuple[int, int]) -> list[Sequence]:
        """Return the paused sequences to preempt for `num_pages` available pages; see `PausedPages.victims`."""
        if self._paused_pages is None:
            return []
        return self._paused_pages.victims(num_pages - self.lane.cache.num_evictable_pages, rank)

    # Steps

    def clear_pending(self) -> None:
        """Drop the steps in flight, whose results are lost."""
        clear_in_flight(row for step in self.pending for row in step.sampled)
        self.pending.clear()

    def retire(self) -> None:
        """Drop all device buffers except the cache. The reader ends after the pending results."""
        self.transition = None
        self.reader.close(wait=bool(self.pending))
        del self.sampler, self.runner, self.launcher

    def close(self) -> None:
        """Drop all device buffers, also of paused instances."""
        for member in self.drop_paused():
            member.close()
        for site in self.runner.sites.values():
            site.kv.clear()
        self.reader.close(wait=True)  # its thread keeps the last result for a moment after it has set the future
        self.retire()
