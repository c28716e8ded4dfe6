"""One serving replica: devices with a view of the weights, a share of the KV cache, and running sequences."""

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from amoeba_jax.instances.changing import PageCounts
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.pace import Pace
from amoeba_jax.instances.paused import PausedPages
from amoeba_jax.instances.prompt_turns import PromptTurns
from amoeba_jax.instances.result_reader import ResultReader
from amoeba_jax.instances.runner import Runner
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.site import Site
from amoeba_jax.instances.step_launcher import StepLauncher
from amoeba_jax.instances.step_plan import PendingStep, StepPlan
from amoeba_jax.instances.step_sampler import StepSampler
from amoeba_jax.programs.buckets import Buckets
from amoeba_jax.programs.executables import Executables
from kvcache.allocator import BuddyAllocator, OutOfPagesError


class Instance:
    """Used by the dispatcher thread only.

    Args:
        runner: of its steps, at its placement.
        lanes: its sequences. One, or, while it merges or splits, one for each instance of the lower degree.
        sampler: on its first device.
        buckets: its step shapes.
        lane_buckets: those of instances of the lower degree, while it merges or splits.
        released: the degree for which shards of its weights are KV extents.
        on_result: called from another thread whenever a result has arrived; must not block.

    Attributes:
        launcher: of its steps.
        reader: of what they return.
        pending: steps that were launched and whose results have not been taken.
        transition: what changes the placement of its layers.
        pace: of its steps whose results were taken.
        turns: whose prompts it computes next.
        last_was_prompt: its latest step computed a prompt.
        paused: instances over its devices whose requests are paused while it serves.
    """

    def __init__(
        self,
        runner: Runner,
        lanes: list[Lane],
        sampler: StepSampler,
        on_result: Callable[[], None],
        executables: Executables,
        *,
        buckets: Buckets,
        released: int,
    ):
        self.group = runner.group
        self.id = self.group.start
        self.runner, self.lanes, self.sampler = runner, lanes, sampler
        self.buckets = self.lane_buckets = buckets
        self.released = released
        self.pending: deque[PendingStep] = deque()
        self.num_launched = 0
        self.last_was_prompt = False
        self.transition: Any = None
        self.pace = Pace()
        self.turns = PromptTurns()
        self._free_slots = list(range(sampler.num_slots))[::-1]
        self.paused: tuple[Instance, ...] = ()
        self._paused_pages: PausedPages | None = None
        self.page_allocators: list[tuple[BuddyAllocator, int, int]] = []
        """Allocators of an instance with a placement of its own, with their device and their number of layers."""
        self.reader = ResultReader(f"amoeba-read-{self.id}", on_result)
        self.launcher = StepLauncher(runner, sampler, self.reader, executables)

    @property
    def is_placed(self) -> bool:
        """Whether it has a placement of its own. Such an instance does not merge or split."""
        return bool(self.page_allocators)

    @property
    def tp(self) -> int:
        return self.group.tp

    @property
    def site(self) -> Site:
        """Where its embedding and head are computed, and in steady state all layers."""
        return self.runner.sites[self.runner.placement.head]

    @property
    def lane(self) -> Lane:
        """The only lane of an instance in steady state."""
        (lane,) = self.lanes
        return lane

    @property
    def capacity_tokens(self) -> int:
        """Tokens that it holds when empty and all of its layers are at its degree."""
        if self.is_placed:
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
        """Sequences that it decodes at once."""
        return self.buckets.max_num_seqs

    @property
    def num_free_slots(self) -> int:
        """Sequences that it could run besides those that it runs."""
        return max(min(self.max_running - len(self.running), len(self._free_slots)), 0)

    def lane_of(self, sequence: Sequence) -> Lane:
        """The lane that has a running sequence."""
        if len(self.lanes) == 1:
            return self.lanes[0]
        return next(lane for lane in self.lanes if sequence in lane.running)

    def add(self, sequence: Sequence, lane: Lane) -> None:
        """Take a sequence that has its pages. Where that fails, it is not taken.

        Raises whatever the sampler's program does, or `StateLostError`.
        """
        slot = self._free_slots.pop()
        try:
            self.sampler.remember(sequence, slot)
        except BaseException:
            self._free_slots.append(slot)
            raise
        sequence.slot = slot
        lane.running.append(sequence)

    def reserve(self, sequence: Sequence, num_tokens: int) -> Collection[Sequence]:
        """Give a sequence pages for that many tokens. Returns none, or, where they do not fit, the sequences that hold
        the pages it lacks, itself among them."""
        assert sequence.pages is not None
        lane = self.lane_of(sequence)
        try:
            lane.cache.reserve(sequence.pages, num_tokens)
        except OutOfPagesError:
            if len(self.lanes) > 1:
                return self._reserve_beside(sequence, num_tokens, lane)
            if self._paused_pages is not None:
                in_the_way = self._paused_pages.in_the_way(sequence.pages.num_lacking(num_tokens))
                if yielding := [s for s in in_the_way if s.rank >= sequence.rank]:
                    return yielding
            return lane.running
        return ()

    def _reserve_beside(self, sequence: Sequence, num_tokens: int, lane: Lane) -> Collection[Sequence]:
        """Cached prefixes of other lanes may have the pages that a lane lacks, of those that all lanes share."""
        assert sequence.pages is not None
        needed = sequence.pages.num_lacking(num_tokens)
        lane.make_free(needed, self.lanes)
        try:
            lane.cache.reserve(sequence.pages, num_tokens)
        except OutOfPagesError:
            # Of the pages that only this lane has there is none, or of those that all lanes share.
            return lane.running if lane.lacks_own_pages(needed, self.lanes) else self.running
        return ()

    def remove(self, sequence: Sequence) -> None:
        """Give up a sequence; its pages stay with the prefix cache as long as there is room."""
        lane = self.lane_of(sequence)
        self.leave(sequence, lane)
        sequence.slot = -1
        assert sequence.pages is not None
        lane.cache.release(sequence.pages)
        sequence.pages = None

    def leave(self, sequence: Sequence, lane: Lane) -> None:
        """Have a sequence not run here any more, which keeps its pages."""
        lane.running.remove(sequence)
        self._free_slots.append(sequence.slot)

    def page_counts(self) -> PageCounts:
        """How its pages are used, at its own degree."""
        lane = self.lanes[0]
        if self.is_placed:
            lane = max(self.lanes, key=lambda lane: lane.cache.num_available_pages)
            cached = sum(lane.cache.num_evictable_pages for lane in self.lanes)  # some on devices that lanes share
            total = lane.pages.num_total_pages
            return PageCounts(total, min(lane.pages.num_free_pages + cached, total), min(cached, total))
        ranks = lane.ranks[(self.runner.placement.head,) * len(self.lanes)]
        cached = sum(lane.cache.num_evictable_pages for lane in self.lanes)
        if self._paused_pages is None:
            free = min(lane.pages.free_by_rank()[ranks])
        else:
            free = self._paused_pages.num_free_pages()
        return PageCounts(min(lane.pages.total_by_rank()[ranks]), free + cached, cached)

    def take_the_place_of(self, members: "tuple[Instance, ...]") -> None:
        """Serve, without a sequence yet, while the sequences of instances over the same devices are paused. They keep
        their slots, of which those on this one's first device are not given to others, and their pages, of which those
        of cached prefixes are given up where this one needs them."""
        kept = {sequence.slot for sequence in members[0].running}
        self._free_slots = [slot for slot in self._free_slots if slot not in kept]
        self.lane.max_running = min(self.lane.max_running, len(self._free_slots) + len(self.running))
        self.paused = members
        self._paused_pages = PausedPages(self.lane.pages, [member.lane for member in members])
        self.lane.cache.lender = self._paused_pages

    def drop_paused(self) -> "tuple[Instance, ...]":
        """Have no paused instances any more, and return those that there were."""
        members, self.paused, self._paused_pages = self.paused, (), None
        for lane in self.lanes:
            lane.cache.lender = None
        return members

    @property
    def paused_sequences(self) -> list[Sequence]:
        """The sequences of paused instances."""
        return [sequence for member in self.paused for sequence in member.running]

    def paused_in_the_way(self, num_pages: int, rank: tuple[int, int]) -> list[Sequence]:
        """The paused sequences, of this rank or behind it, that would have to go for that many pages to be available:
        those that are served last first. None where that would not do."""
        needed, pages = num_pages - self.lane.cache.num_evictable_pages, self._paused_pages
        return [] if pages is None else pages.yielding(needed, rank)

    # Steps

    def launch_plan(self, plan: StepPlan) -> None:
        """Launch a step, whose results are `pending` then. Raises what `StepLauncher.launch` does."""
        step = self.launcher.launch(plan, self.lanes)
        if self.transition is not None:
            step.decodes = False
        self.pending.append(step)
        self.num_launched += 1
        self.last_was_prompt = not plan.decodes

    def retire(self) -> None:
        """Stop the reader, once it has read what is pending, and let go of all device buffers but the cache."""
        self.transition = None
        self.reader.close(wait=bool(self.pending))
        del self.sampler, self.runner, self.launcher

    def close(self) -> None:
        """Stop the reader and drop all device buffers, those of paused instances as well."""
        for member in self.drop_paused():
            member.close()
        for site in self.runner.sites.values():
            site.kv.clear()
        self.retire()
