"""Admission: the start of waiting sequences on instances, and the preemption of sequences to free slots and pages."""

import time

from amoeba_jax.engine.sequences import Sequences
from amoeba_jax.engine.steps import Steps
from amoeba_jax.errors import DeadlineError, RequestError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.page_copies import copy_page, copy_specs, host_specs, read_to_host, write_from_host
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_sampler import StateLostError
from amoeba_jax.stats import EngineStats
from amoeba_jax.transform.changes import Changes
from amoeba_jax.transform.options import TransformOptions
from kvcache.pages import SequencePages
from sharding.ledger import format_bytes, parse_bytes
from sharding.mesh import is_lost

# `Admission.choose` counts each running sequence of a lane as this number of tokens to compute.
_DECODE_COST = 16


class Admission:
    """Methods that start and preempt sequences. Used by the dispatcher thread only.

    If the engine has no scheduler, the engine calls `admit` in each turn of its loop. If the engine has a scheduler,
    the scheduler instead calls `start`, `preempt` and `offload`.

    If a request has several samples (`n > 1`), the first sample is the leader. The other samples are called siblings. A
    sibling can share the prompt pages of its leader.
    """

    def __init__(
        self,
        cluster: Cluster,
        sequences: Sequences,
        changes: Changes,
        steps: Steps,
        stats: EngineStats,
    ):
        self._cluster, self._sequences = cluster, sequences
        self._changes, self._steps, self._stats = changes, steps, stats
        self._geometry = cluster.dims.pages

    def admit(self) -> None:
        """Start waiting sequences in the order of the queue. Skip sequences that wait for the compilation of a program.

        If no lane has room for a sequence, preempt other sequences (`_victims`). If preemption cannot make enough room,
        start no further sequence: no later sequence of the queue may overtake a sequence that needs room.

        Reject sequences whose deadline has passed, and sequences that are too long for every instance.
        """
        for sequence in self._sequences.waiting.expired(time.monotonic()):
            self._sequences.reject(sequence, DeadlineError("deadline exceeded while the request was queued"))
        waiting = self._sequences.waiting
        while (sequence := next((s for s in waiting if not self.awaits_program(s)), None)) is not None:
            if sequence.num_in_flight:
                return  # the sequence was just preempted, and its last token is not known yet
            if (chosen := self.choose(sequence)) is not None:
                self._start(*chosen, sequence)
            elif self._never_fits(sequence):
                capacity = max(instance.capacity_tokens for instance in self._cluster.instances)
                message = (
                    f"it needs {sequence.max_total_tokens} tokens, and no instance holds more than {capacity} any more"
                )
                self._sequences.reject(sequence, RequestError(message))
            elif victims := self._victims(sequence):
                for victim in victims:
                    self._sequences.preempt(self._cluster.instance_of(victim), victim)
            else:
                return

    def awaits_program(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence needs a program that is not compiled yet.

        If so, start to compile the missing programs in the background.
        """
        wanted = []
        for instance in self._cluster.instances:
            if sequence.sampling.uses_state:
                wanted += instance.runner.state_specs()
            # A leader waits for the programs of its siblings too: siblings can share pages only with a running leader.
            if sequence.siblings or (sequence.leader is not None and sequence.leader.slot >= 0):
                wanted += copy_specs(instance)
            if sequence.host_pages is not None:
                wanted += host_specs(instance)
        return bool(wanted) and not self._cluster.executables.request(wanted)

    def check_waiting(self, options: TransformOptions) -> None:
        """Raise `RequestError` if a waiting request would fit on no instance after a transformation with `options`."""
        limit, degree = max(self._changes.capacity_to_come(i, options) for i in self._cluster.instances)
        for sequence in self._sequences.waiting:
            if sequence.max_total_tokens > limit:
                raise RequestError(
                    f"the transformation is refused: request {sequence.request_id!r}, which waits, needs "
                    f"{sequence.max_total_tokens} tokens, and a TP{degree} instance would hold {limit}"
                )

    def _never_fits(self, sequence: Sequence) -> bool:
        """Return whether a sequence is too long for every present instance.

        If a change is in progress, or if devices are out of service, return False. There may soon be a larger instance.
        """
        if self._changes.busy or self._cluster.lost:
            return False
        return all(i.capacity_tokens < sequence.max_total_tokens for i in self._cluster.instances)

    # Decisions of a scheduler

    def start(self, instance: Instance, sequence: Sequence) -> None:
        """Start a waiting sequence on an instance.

        Raises `RequestError`, and changes nothing, if the sequence is not in the queue, if the host does not know its
        last token yet, or if the instance has no room for the sequence now.
        """
        most = sequence.max_total_tokens
        if sequence not in self._sequences.waiting or sequence.num_in_flight:
            raise RequestError(f"request {sequence.request_id!r} does not wait")
        if instance.capacity_tokens < most:
            raise RequestError(f"instance {instance.id} holds {instance.capacity_tokens} tokens, and it needs {most}")
        lane = self._lane_for(instance, sequence)
        if lane is None:
            raise RequestError(f"instance {instance.id} has no room for {sequence.num_known} tokens now")
        self._start(instance, lane, sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free the pages of a running or paused sequence, and put the sequence back into the queue.

        When the sequence starts again, its KV cache is computed again, except pages that are still in the prefix cache.
        Raises `RequestError`, and changes nothing, if the sequence neither runs nor is paused, or if the phase of its
        instance is `draining` or `changing`.
        """
        if sequence.slot < 0:
            raise RequestError(f"request {sequence.request_id!r} does not run")
        self._sequences.preempt(self._steady_instance_of(sequence), sequence)

    def offload(self, sequence: Sequence) -> None:
        """Copy the KV cache of a running sequence to host memory, and put the sequence back into the queue.

        When the sequence starts again, its KV cache is copied back instead of computed again.

        Raises `RequestError`, and does not change the sequence, in these cases:

        - The sequence does not run, or the phase of its instance is `draining` or `changing`.
        - The programs that copy pages are not compiled yet. Their compilation is started in the background.
        - The KV cache needs more host memory than is left of `EngineConfig.offload_memory`.
        - The copy fails.
        """
        if sequence.slot < 0 or sequence.paused or sequence.pages is None:
            raise RequestError(f"request {sequence.request_id!r} does not run")
        cluster, instance = self._cluster, self._steady_instance_of(sequence)
        if not cluster.executables.request(host_specs(instance)):
            raise RequestError("programs to copy pages are being compiled: try again later")
        held = sum(s.host_pages.num_bytes for s in self._sequences.waiting if s.host_pages is not None)
        limit = parse_bytes(cluster.config.offload_memory)
        size = sequence.pages.num_pages * cluster.memory_plan.page_bytes * cluster.dims.config.num_layers
        if held + size > limit:
            raise RequestError(
                f"request {sequence.request_id!r} needs {format_bytes(size)} of host memory, and {format_bytes(held)} "
                f"of offload_memory={format_bytes(limit)} are used"
            )
        try:
            pages = read_to_host(instance, sequence)
        except Exception as error:
            raise RequestError(f"the pages of request {sequence.request_id!r} cannot be copied: {error}") from error
        self._sequences.preempt(instance, sequence)
        sequence.host_pages = pages

    def _steady_instance_of(self, sequence: Sequence) -> Instance:
        instance = self._cluster.instance_of(sequence)
        if instance.phase in (Phase.DRAINING, Phase.CHANGING):
            raise RequestError(f"instance {instance.id} is being transformed")
        return instance

    # Start of one sequence

    def _start(self, instance: Instance, lane: Lane, sequence: Sequence) -> None:
        """Move a sequence from the queue into a lane. Give the sequence pages and a slot.

        If the start fails, only this sequence ends with an error. If the failure has destroyed KV cache or sampling
        state, `Steps.recover` puts the other sequences of the instance back into the queue.
        """
        self._sequences.waiting.remove(sequence)
        try:
            if sequence.host_pages is not None:
                sequence.pages = SequencePages(lane.pages)
                lane.cache.reserve(sequence.pages, sequence.num_known)
                sequence.num_computed = sequence.host_pages.num_computed
            elif self.leader_home(sequence) is instance:
                self._fork(instance, lane, sequence)
            else:
                sequence.pages = lane.cache.match(self._reusable_keys(sequence))
                sequence.num_computed = sequence.pages.num_pages * self._geometry.page_size
                lane.cache.reserve(sequence.pages, sequence.num_known)
            instance.add(sequence, lane)
            if sequence.host_pages is not None:
                write_from_host(instance, sequence)
                sequence.host_pages = None
        except Exception as error:
            if sequence.slot >= 0:  # the sequence was added, but its pages could not be written
                instance.leave(sequence, lane)
                sequence.slot = -1
            if sequence.pages is not None:
                lane.cache.release(sequence.pages)
                sequence.pages = None
            self._sequences.reject(sequence, error)
            extents = (extent for site in instance.runner.sites.values() for extent in site.extents())
            if isinstance(error, StateLostError) or any(map(is_lost, extents)):
                self._steps.recover(instance, error)
            return
        if sequence.started_at is None:
            sequence.num_cached = sequence.num_computed
            self._stats.cached_tokens += sequence.num_computed
        sequence.start()

    def _fork(self, instance: Instance, lane: Lane, sequence: Sequence) -> None:
        """Let a sibling share the prompt pages of its leader. A sibling is a second or later sample of a request.

        The sibling gets its own copy of the last prompt page. The sibling then computes the last prompt token again, to
        get the logits for the sibling's first output token.
        """
        leader = sequence.leader
        assert leader is not None, "only siblings fork"
        assert leader.pages is not None, "the leader runs on this instance"
        for spec in copy_specs(instance):  # before any change, because a compilation may fail
            self._cluster.executables.get(spec)
        last = len(sequence.prompt) - 1
        table = leader.pages.table[:, : self._geometry.pages_for(len(sequence.prompt))]
        lane.pages.share(table)
        sequence.pages = SequencePages(lane.pages, table)
        sequence.num_computed = last
        copied = lane.cache.make_private(sequence.pages, last // self._geometry.page_size)
        assert copied is not None, "the leader has this page too"
        copy_page(instance, lane, *copied)

    # Search for an instance. The methods below change nothing.

    def leader_home(self, sequence: Sequence) -> Instance | None:
        """Return the instance on which a sequence can share the prompt pages of its leader now, or None.

        This is the instance on which the leader runs. The result is None if, for example, the leader's prompt is not
        computed yet, or if the instance has no free slot, or no available page for a copy of the last prompt page.
        """
        leader = sequence.leader
        if leader is None or sequence.host_pages is not None or sequence.num_generated:
            return None
        if leader.slot < 0 or leader.num_computed < len(leader.prompt):
            return None
        home = self._cluster.instance_of(leader)
        if home not in self._cluster.instances:
            return None  # the leader is paused
        lane = home.lane_of(leader)
        return home if home.num_free_slots and lane.has_free_slot and lane.cache.num_available_pages > 0 else None

    def choose(self, sequence: Sequence) -> tuple[Instance, Lane] | None:
        """Return `(instance, lane)` in which to start a sequence now. Return None if no lane has room for the sequence.

        If the sequence can share the prompt pages of its leader, choose the leader's lane. Otherwise, choose the lane
        with room that has the fewest tokens to compute, including the tokens of this sequence that are not cached. Each
        running sequence of a lane counts as `_DECODE_COST` more tokens.
        """
        if (home := self.leader_home(sequence)) is not None:
            assert sequence.leader is not None, "it has a home"
            return home, home.lane_of(sequence.leader)
        keys = self._reusable_keys(sequence)
        best: tuple[int, Instance, Lane] | None = None
        for instance, lane in self._suitable(sequence):
            if (
                instance.num_free_slots
                and lane.has_free_slot
                and lane.cache.fits(keys, self._tokens_needed(lane, sequence))
            ):
                new = sequence.num_known - lane.cache.num_cached(keys) * self._geometry.page_size
                backlog = sum(s.num_uncomputed_tokens for s in lane.running)
                cost = new + backlog + _DECODE_COST * len(lane.running)
                if best is None or cost < best[0]:
                    best = cost, instance, lane
        return best[1:] if best else None

    def _lane_for(self, instance: Instance, sequence: Sequence) -> Lane | None:
        """Return the lane of `instance` in which to start a sequence. Return None if no lane has room for the sequence.

        If the sequence can share the prompt pages of its leader on this instance, return the leader's lane. Otherwise,
        return the lane that has the most available pages among the lanes with room.
        """
        if self.leader_home(sequence) is instance:
            assert sequence.leader is not None, "it has a home"
            return instance.lane_of(sequence.leader)
        keys = self._reusable_keys(sequence)
        fitting = [
            lane
            for lane in instance.lanes
            if instance.num_free_slots
            and lane.has_free_slot
            and sequence.max_total_tokens <= lane.capacity_tokens
            and lane.cache.fits(keys, sequence.num_known)
        ]
        return max(fitting, key=lambda lane: lane.cache.num_available_pages, default=None)

    def _victims(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences to preempt so that `sequence` can start. Return [] if preemption is not enough.

        Each lane that is large enough for `sequence` has two groups of candidates:

        1. Paused sequences on devices that lack pages for `sequence`. Their priority (`Sequence.rank`) is equal to or
           lower than the priority of `sequence`.
        2. Running sequences of the lane. Their priority is lower than the priority of `sequence`.

        The victims of a lane are candidates of only one group: the first group that can make enough room. Candidates
        become victims one by one, from the latest in `Sequence.order` on, until there is enough room. If neither group
        can make enough room, the lane has no victims. If several lanes have victims, return the victims of the lane
        whose last added victim is latest in `Sequence.order`.
        """
        found: list[tuple[tuple[tuple[int, ...], int, int], list[Sequence]]] = []
        for instance, lane in self._suitable(sequence):
            lower = [s for s in lane.running if s.rank > sequence.rank and not s.finished]
            lower.sort(key=lambda s: s.order, reverse=True)
            victims = None
            if instance.paused and instance.transition is None and lane.has_free_slot:
                needed = self._geometry.pages_for(self._tokens_needed(lane, sequence))
                victims = instance.paused_victims(needed, sequence.rank)
            if not victims:
                counts = range(1, len(lower) + 1)
                victims = next((lower[:n] for n in counts if self._fits_without(lane, sequence, lower[:n])), None)
            if victims:
                found.append(((victims[-1].order, -len(victims), -instance.id), victims))
        return max(found, key=lambda item: item[0])[1] if found else []

    def _suitable(self, sequence: Sequence) -> list[tuple[Instance, Lane]]:
        """Return `(instance, lane)` for each lane in which a sequence would fit if the lane had no other sequences."""
        return [
            (instance, lane)
            for instance in self._cluster.instances
            for lane in instance.lanes
            if lane.capacity_tokens >= sequence.max_total_tokens
        ]

    def _reusable_keys(self, sequence: Sequence) -> list[bytes]:
        """Return the prefix cache keys of the pages that a sequence may take from the prefix cache.

        The page with the last known token is left out, because a step must compute this token to sample the next token.
        The result is empty if the sequence is offloaded, or if log-probabilities of its prompt must be computed.
        """
        if sequence.needs_prompt_logits or sequence.host_pages is not None:
            return []
        assert sequence.page_keys is not None
        sequence.page_keys.extend(sequence.tokens(sequence.page_keys.num_tokens, sequence.num_known))
        return sequence.page_keys.keys[: (sequence.num_known - 1) // self._geometry.page_size]

    def _tokens_needed(self, lane: Lane, sequence: Sequence, num_leaving: int = 0) -> int:
        """Return the number of tokens for which a lane must have available pages before `sequence` starts there.

        The result is the number of known tokens of `sequence`, plus one page of future tokens for each sequence that
        will run in the lane, including `sequence`. Without pages for future tokens, a sequence could soon be preempted.

        Args:
            lane: lane in which `sequence` would start.
            sequence: sequence to start.
            num_leaving: number of running sequences that leave the lane before `sequence` starts.
        """
        page_size = self._geometry.page_size
        return min(sequence.num_known + page_size, sequence.max_total_tokens) + page_size * (
            len(lane.running) - num_leaving
        )

    def _fits_without(self, lane: Lane, sequence: Sequence, leaving: list[Sequence]) -> bool:
        """Return whether a sequence could start in a lane if the sequences in `leaving` were preempted first."""
        if lane.closed or len(lane.running) - len(leaving) >= lane.max_running:
            return False
        needed = self._geometry.pages_for(self._tokens_needed(lane, sequence, len(leaving)))
        return needed <= lane.cache.num_available_pages + lane.num_pages_of(leaving)
