"""Which waiting sequences start where, and who has to make room for them."""

import time

from amoeba_jax.engine.launching import Launching
from amoeba_jax.engine.recovery import Recovery
from amoeba_jax.engine.sequences import Sequences
from amoeba_jax.errors import DeadlineError, RequestError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.room import Room
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.stats import EngineStats
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.transformations import Transformations
from kvcache.pages import SequencePages


class SequenceAdmission:
    """Starts waiting sequences. Used by the dispatcher thread only.

    Args:
        launching: is told of an instance whose buffers a program has lost.
    """

    def __init__(
        self,
        cluster: Cluster,
        sequences: Sequences,
        room: Room,
        transformations: Transformations,
        launching: Launching,
        stats: EngineStats,
    ):
        self._cluster, self._sequences, self._room = cluster, sequences, room
        self._transformations, self._launching, self._stats = transformations, launching, stats

    def admit(self) -> None:
        """Place waiting sequences, in order: none overtakes within a rank, so none starves."""
        waiting = self._sequences.waiting
        for sequence in self._sequences.deadlines.expired(time.monotonic()):
            self._sequences.reject(sequence, DeadlineError("deadline exceeded while the request was queued"))
        while (sequence := next((s for s in waiting if not self.awaits_program(s)), None)) is not None:
            if sequence.num_in_flight:
                return  # preempted a moment ago: its last token is not known yet
            chosen = self._room.choose(sequence)
            if chosen is not None:
                self._sequences.dequeue(sequence)
                self._place(*chosen, sequence)
            elif self._fits_nowhere(sequence):
                capacity = max(instance.capacity_tokens for instance in self._cluster.instances)
                message = (
                    f"it needs {sequence.max_total_tokens} tokens, and no instance holds more than {capacity} any more"
                )
                self._sequences.reject(sequence, RequestError(message))
            elif not self._preempt_lower_rank(sequence):
                return

    def awaits_program(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence cannot be placed yet for want of a program, which is compiled meanwhile."""
        wanted = []
        for instance in self._cluster.instances:
            if sequence.sampling.uses_state:
                wanted += instance.launcher.state_specs()
            # A leader waits for what its siblings need: they share its prompt's pages only while it runs.
            if sequence.siblings or (sequence.leader is not None and sequence.leader.slot >= 0):
                wanted += instance.launcher.page_copy_specs()
        return bool(wanted) and not self._cluster.executables.request(wanted)

    def check_waiting(self, options: TransformOptions) -> None:
        """Raise `RequestError` if a waiting request would not fit any instance afterwards."""
        limit, degree = max(self._transformations.capacity_to_come(i, options) for i in self._cluster.instances)
        for sequence in self._sequences.waiting:
            if sequence.max_total_tokens > limit:
                raise RequestError(
                    f"the transformation is refused: request {sequence.request_id!r}, which waits, needs "
                    f"{sequence.max_total_tokens} tokens, and a TP{degree} instance would hold {limit}"
                )

    def _fits_nowhere(self, sequence: Sequence) -> bool:
        """It came before instances became smaller, or before those failed that should have become larger."""
        if self._transformations.busy or self._cluster.lost:
            return False  # there may be larger ones again
        return all(i.capacity_tokens < sequence.max_total_tokens for i in self._cluster.instances)

    # For a scheduler

    def start(self, instance: Instance, sequence: Sequence) -> None:
        """Let a waiting sequence run. Raises `RequestError`, and it waits on, if it cannot run there now."""
        most = sequence.max_total_tokens
        if sequence not in self._sequences.waiting or sequence.num_in_flight:
            raise RequestError(f"request {sequence.request_id!r} does not wait")
        if instance.capacity_tokens < most:
            raise RequestError(f"instance {instance.id} holds {instance.capacity_tokens} tokens, and it needs {most}")
        lane = self._room.lane_for(instance, sequence)
        if lane is None:
            raise RequestError(f"instance {instance.id} has no room for {sequence.num_known} tokens now")
        self._sequences.dequeue(sequence)
        self._place(instance, lane, sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence off its instance; it waits, and is computed again from its tokens.

        Raises `RequestError`, with nothing changed, if it does not run, or where its instance is being transformed.
        """
        if sequence.slot < 0:
            raise RequestError(f"request {sequence.request_id!r} does not run")
        home = self._room.home(sequence)
        if home.transition is not None or self._transformations.is_about_to_change(home):
            raise RequestError(f"instance {home.id} is being transformed")
        self._sequences.preempt(home, sequence)

    # One sequence

    def _place(self, instance: Instance, lane: Lane, sequence: Sequence) -> None:
        """Give a sequence its pages and a slot. Whatever fails of that ends this sequence, and no other."""
        page_size = self._cluster.dims.page_size
        try:
            if self._room.leader_home(sequence) is instance:
                self._fork(instance, lane, sequence)
            else:
                sequence.pages = lane.cache.match(self._room.reusable_keys(sequence))
                sequence.num_computed = sequence.pages.num_pages * page_size
                lane.cache.reserve(sequence.pages, sequence.num_known)
            instance.add(sequence, lane)
        except Exception as error:
            if sequence.pages is not None:
                lane.cache.release(sequence.pages)
                sequence.pages = None
            self._sequences.reject(sequence, error)
            if Recovery.is_due(instance, error):
                self._launching.failed(instance, error)
            return
        first = sequence.started_at is None
        sequence.start()
        if first:
            sequence.num_cached = sequence.num_computed
            self._stats.cached_tokens += sequence.num_computed

    def _fork(self, instance: Instance, lane: Lane, sequence: Sequence) -> None:
        """Share the pages of the leader's prompt. The last token is computed again, in a copy of its page."""
        leader = sequence.leader
        assert leader is not None, "only a sibling forks"
        assert leader.pages is not None, "it runs here"
        for request in instance.launcher.page_copy_specs():  # before anything changes: one may fail
            self._cluster.executables.get(request)
        last = len(sequence.prompt) - 1
        table = leader.pages.table[:, : self._cluster.dims.pages.pages_for(len(sequence.prompt))]
        lane.pages.share(table)
        sequence.pages = SequencePages(lane.pages, table)
        sequence.num_computed = last
        copied = lane.cache.make_private(sequence.pages, last // self._cluster.dims.page_size)
        assert copied is not None, "the leader has it too"
        instance.launcher.copy_page(instance.lanes, lane, *copied)

    def _preempt_lower_rank(self, sequence: Sequence) -> bool:
        """Preempt sequences that rank behind this one where that makes enough room for this one."""
        found = self._room.victims(sequence)
        if found is None:
            return False
        for victim in found[1]:
            self._sequences.preempt(self._room.home(victim), victim)
        return True
