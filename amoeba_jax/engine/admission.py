"""Admission: start waiting sequences on instances, and preempt running sequences for them."""

import time

from amoeba_jax.engine.sequences import Sequences
from amoeba_jax.engine.steps import Steps
from amoeba_jax.errors import DeadlineError, RequestError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.host_pages import page_specs, read_to_host, write_from_host
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.room import Room
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.stats import EngineStats
from amoeba_jax.transform.changes import Changes
from amoeba_jax.transform.options import TransformOptions
from kvcache.pages import SequencePages
from sharding.ledger import format_bytes, parse_bytes


class Admission:
    """Start and preemption of sequences. Without a scheduler, the engine calls `admit`.

    A scheduler calls the other methods.

    Used by the dispatcher thread only.
    """

    def __init__(
        self,
        cluster: Cluster,
        room: Room,
        sequences: Sequences,
        changes: Changes,
        steps: Steps,
        stats: EngineStats,
    ):
        self._cluster, self._room, self._sequences = cluster, room, sequences
        self._changes, self._steps, self._stats = changes, steps, stats

    def admit(self) -> None:
        """Start waiting sequences in the order of the queue.

        No sequence overtakes another of its priority, so none starves.
        """
        for sequence in self._sequences.deadlines.expired(time.monotonic()):
            self._sequences.reject(sequence, DeadlineError("deadline exceeded while the request was queued"))
        waiting = self._sequences.waiting
        while (sequence := next((s for s in waiting if not self.awaits_program(s)), None)) is not None:
            if sequence.num_in_flight:
                return  # it was just preempted, and its last token is not known yet
            if (chosen := self._room.choose(sequence)) is not None:
                self._start(*chosen, sequence)
            elif self._never_fits(sequence):
                capacity = max(instance.capacity_tokens for instance in self._cluster.instances)
                message = (
                    f"it needs {sequence.max_total_tokens} tokens, and no instance holds more than {capacity} any more"
                )
                self._sequences.reject(sequence, RequestError(message))
            elif (found := self._room.victims(sequence)) is not None:
                for victim in found[1]:
                    self._sequences.preempt(self._room.home(victim), victim)
            else:
                return

    def awaits_program(self, sequence: Sequence) -> bool:
        """Return whether a program must be compiled before a waiting sequence can start. Request the program."""
        wanted = []
        for instance in self._cluster.instances:
            if sequence.sampling.uses_state:
                wanted += instance.launcher.state_specs()
            # A leader waits for the programs of its siblings: they share its prompt's pages only while it runs.
            if sequence.siblings or (sequence.leader is not None and sequence.leader.slot >= 0):
                wanted += instance.launcher.page_copy_specs()
            if sequence.host_pages is not None:
                executables = self._cluster.executables
                wanted += page_specs(instance.runner, executables, self._cluster.plan.transfer_pages)
        return bool(wanted) and not self._cluster.executables.request(wanted)

    def check_waiting(self, options: TransformOptions) -> None:
        """Raise `RequestError` if a waiting request would fit on no instance after this transformation."""
        limit, degree = max(self._changes.capacity_to_come(i, options) for i in self._cluster.instances)
        for sequence in self._sequences.waiting:
            if sequence.max_total_tokens > limit:
                raise RequestError(
                    f"the transformation is refused: request {sequence.request_id!r}, which waits, needs "
                    f"{sequence.max_total_tokens} tokens, and a TP{degree} instance would hold {limit}"
                )

    def _never_fits(self, sequence: Sequence) -> bool:
        """Return whether a sequence fits on no instance, and no instance will become larger."""
        if self._changes.busy or self._cluster.lost:
            return False
        return all(i.capacity_tokens < sequence.max_total_tokens for i in self._cluster.instances)

    # Decisions of a scheduler

    def start(self, instance: Instance, sequence: Sequence) -> None:
        """Start a waiting sequence on an instance. Raise `RequestError`, and change nothing, if that is impossible."""
        most = sequence.max_total_tokens
        if sequence not in self._sequences.waiting or sequence.num_in_flight:
            raise RequestError(f"request {sequence.request_id!r} does not wait")
        if instance.capacity_tokens < most:
            raise RequestError(f"instance {instance.id} holds {instance.capacity_tokens} tokens, and it needs {most}")
        lane = self._room.lane_for(instance, sequence)
        if lane is None:
            raise RequestError(f"instance {instance.id} has no room for {sequence.num_known} tokens now")
        self._start(instance, lane, sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Requeue a running sequence and free its pages. It is computed again from its tokens later.

        Raise `RequestError`, and change nothing, if the sequence does not run or its instance is being transformed.
        """
        if sequence.slot < 0:
            raise RequestError(f"request {sequence.request_id!r} does not run")
        home = self._room.home(sequence)
        if home.phase in (Phase.DRAINING, Phase.CHANGING):
            raise RequestError(f"instance {home.id} is being transformed")
        self._sequences.preempt(home, sequence)

    # Start of one sequence

    def _start(self, instance: Instance, lane: Lane, sequence: Sequence) -> None:
        """Remove a sequence from the queue, and give it pages and a slot. If that fails, only this sequence ends."""
        self._sequences.waiting.remove(sequence)
        try:
            if sequence.host_pages is not None:
                sequence.pages = SequencePages(lane.pages)
                lane.cache.reserve(sequence.pages, sequence.num_known)
                sequence.num_computed = sequence.host_pages.num_computed
            elif self._room.leader_home(sequence) is instance:
                self._fork(instance, lane, sequence)
            else:
                sequence.pages = lane.cache.match(self._room.reusable_keys(sequence))
                sequence.num_computed = sequence.pages.num_pages * self._cluster.dims.page_size
                lane.cache.reserve(sequence.pages, sequence.num_known)
            instance.add(sequence, lane)
            if sequence.host_pages is not None:
                self._write_from_host(instance, sequence)
        except Exception as error:
            if sequence.slot >= 0:  # it was added, but its pages could not be written
                instance.leave(sequence, lane)
                sequence.slot = -1
            if sequence.pages is not None:
                lane.cache.release(sequence.pages)
                sequence.pages = None
            self._sequences.reject(sequence, error)
            self._steps.recover_if_lost(instance, error)
            return
        if sequence.started_at is None:
            sequence.num_cached = sequence.num_computed
            self._stats.cached_tokens += sequence.num_computed
        sequence.start()

    def _write_from_host(self, instance: Instance, sequence: Sequence) -> None:
        executables, count = self._cluster.executables, self._cluster.plan.transfer_pages
        write_from_host(instance.runner, executables, instance.lanes, sequence, count)
        sequence.host_pages = None

    def offload(self, sequence: Sequence) -> None:
        """Copy the KV cache of a running sequence to host memory, and return the sequence to the queue.

        Later, the sequence continues without being computed again. Raises `RequestError`, and changes nothing, in four
        cases: the sequence does not run, its instance is changing, programs are missing, or the host memory for
        offloaded requests is used up.
        """
        if sequence.slot < 0 or sequence.paused or sequence.pages is None:
            raise RequestError(f"request {sequence.request_id!r} does not run")
        home, cluster = self._room.home(sequence), self._cluster
        if home.phase in (Phase.DRAINING, Phase.CHANGING):
            raise RequestError(f"instance {home.id} is changing")
        if not cluster.executables.request(page_specs(home.runner, cluster.executables, cluster.plan.transfer_pages)):
            raise RequestError("programs to copy pages are being compiled: try again later")
        held = sum(s.host_pages.num_bytes for s in self._sequences.waiting if s.host_pages is not None)
        limit = parse_bytes(cluster.config.offload_memory)
        size = sequence.pages.num_pages * cluster.memory_plan.page_bytes * cluster.dims.config.num_layers
        if held + size > limit:
            raise RequestError(
                f"request {sequence.request_id!r} needs {format_bytes(size)} of host memory, and {format_bytes(held)} "
                f"of offload_memory={format_bytes(limit)} are used"
            )
        count = cluster.plan.transfer_pages
        try:
            pages = read_to_host(home.runner, cluster.executables, home.lanes, sequence, count)
        except Exception as error:
            raise RequestError(f"the pages of request {sequence.request_id!r} cannot be copied: {error}") from error
        self._sequences.preempt(home, sequence)
        sequence.host_pages = pages

    def _fork(self, instance: Instance, lane: Lane, sequence: Sequence) -> None:
        """Let a further sample (`n > 1`) share the prompt's pages with the first sample, its leader.

        The sequence computes the last token of the prompt again, in its own copy of the last page.
        """
        leader = sequence.leader
        assert leader is not None, "only siblings fork"
        assert leader.pages is not None, "the leader runs on this instance"
        for spec in instance.launcher.page_copy_specs():  # a program may fail to compile: get it before any change
            self._cluster.executables.get(spec)
        last = len(sequence.prompt) - 1
        table = leader.pages.table[:, : self._cluster.dims.pages.pages_for(len(sequence.prompt))]
        lane.pages.share(table)
        sequence.pages = SequencePages(lane.pages, table)
        sequence.num_computed = last
        copied = lane.cache.make_private(sequence.pages, last // self._cluster.dims.page_size)
        assert copied is not None, "the leader has this page too"
        instance.launcher.copy_page(instance.lanes, lane, *copied)
