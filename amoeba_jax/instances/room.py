"""Search for an instance that can start a waiting sequence, and for sequences to preempt.

These methods change nothing.
"""

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence

# Cost of a running sequence, in prompt tokens to compute, in the choice of an instance.
_DECODE_COST = 16


class Room:
    """Free slots and pages of all instances of a cluster. Used by the dispatcher thread only."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._page_size = cluster.dims.page_size

    def home(self, sequence: Sequence) -> Instance:
        """Return the instance of a running or paused sequence."""
        return next(instance for instance in self._cluster.all_instances if sequence in instance.running)

    def leader_home(self, sequence: Sequence) -> Instance | None:
        """Return the instance on which a further sample can share the prompt pages of the first sample, its leader.

        Return None if there is no such instance. The further sample needs a slot and one page, for its own copy of the
        prompt's last page.
        """
        leader = sequence.leader
        if (
            leader is None
            or sequence.host_pages is not None
            or sequence.num_generated
            or leader.slot < 0
            or leader.num_computed < len(leader.prompt)
        ):
            return None
        home = self.home(leader)
        if home not in self._cluster.instances:
            return None  # it is paused
        lane = home.lane_of(leader)
        return home if home.num_free_slots and lane.has_free_slot and lane.cache.num_available_pages > 0 else None

    def reusable_keys(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of the pages that a sequence may take from the prefix cache.

        The page with the last token is left out, because a step must compute this token to sample the next token.
        """
        if sequence.needs_prompt_logits or sequence.host_pages is not None:
            return []
        assert sequence.page_keys is not None
        sequence.page_keys.extend(sequence.tokens(sequence.page_keys.num_tokens, sequence.num_known))
        return sequence.page_keys.keys[: (sequence.num_known - 1) // self._page_size]

    def lane_for(self, instance: Instance, sequence: Sequence) -> Lane | None:
        """Return a lane of an instance that can start a sequence now, or None.

        If the sequence can share the prompt pages of its leader, this is the lane of the leader. Otherwise it is the
        lane with the most available pages.
        """
        if self.leader_home(sequence) is instance:
            assert sequence.leader is not None, "it has a home"
            return instance.lane_of(sequence.leader)
        keys = self.reusable_keys(sequence)
        fitting = [
            lane
            for lane in instance.lanes
            if instance.num_free_slots
            and lane.has_free_slot
            and sequence.max_total_tokens <= lane.capacity_tokens
            and lane.cache.fits(keys, sequence.num_known)
        ]
        return max(fitting, key=lambda lane: lane.cache.num_available_pages, default=None)

    def choose(self, sequence: Sequence) -> tuple[Instance, Lane] | None:
        """Choose an instance and lane that can start a sequence now, with the least work. Return None if there is none.

        A further sample that can share the prompt pages of its leader gets
        the leader's lane.
        """
        if (home := self.leader_home(sequence)) is not None:
            assert sequence.leader is not None, "it has a home"
            return home, home.lane_of(sequence.leader)
        keys = self.reusable_keys(sequence)
        best: tuple[tuple[int, int, int], Instance, Lane] | None = None
        for instance, number, lane in self._suitable(sequence):
            if (
                instance.num_free_slots
                and lane.has_free_slot
                and lane.cache.fits(keys, self._tokens_needed(lane, sequence))
            ):
                new = sequence.num_known - lane.cache.num_cached(keys) * self._page_size
                backlog = sum(s.num_uncomputed_tokens for s in lane.running)
                cost = new + backlog + _DECODE_COST * len(lane.running), instance.id, number
                if best is None or cost < best[0]:
                    best = cost, instance, lane
        return best[1:] if best else None

    def victims(self, sequence: Sequence) -> tuple[Instance, list[Sequence]] | None:
        """Return an instance, and its sequences to preempt so that `sequence` can start there.

        Return None if there is none. Running sequences are preempted only if their priority (`Sequence.rank`) is lower
        than the priority of `sequence`. The last in order is preempted first. Paused sequences of the same or a lower
        priority are preempted before running ones.

        If several instances qualify, compare the most important victim of each. The instance whose most important
        victim is last in order is chosen.
        """
        found: list[tuple[tuple[tuple[int, ...], int], Instance, list[Sequence]]] = []
        for instance, _, lane in self._suitable(sequence):
            lower = [s for s in lane.running if s.rank > sequence.rank and not s.finished]
            lower.sort(key=lambda s: s.order, reverse=True)
            victims = None
            if instance.paused and instance.transition is None and lane.has_free_slot:
                needed = self._cluster.dims.pages.pages_for(self._tokens_needed(lane, sequence))
                victims = instance.paused_victims(needed, sequence.rank)
            if not victims:
                counts = range(1, len(lower) + 1)
                victims = next((lower[:n] for n in counts if self._fits_without(lane, sequence, lower[:n])), None)
            if victims:
                found.append(((victims[-1].order, -len(victims)), instance, victims))
        if not found:
            return None
        _, instance, victims = max(found, key=lambda item: (item[0], -item[1].id))
        return instance, victims

    def _suitable(self, sequence: Sequence) -> list[tuple[Instance, int, Lane]]:
        """Return the lanes in which a sequence would fit if they were empty, each with its instance and its index."""
        return [
            (instance, number, lane)
            for instance in self._cluster.instances
            for number, lane in enumerate(instance.lanes)
            if lane.capacity_tokens >= sequence.max_total_tokens
        ]

    def _tokens_needed(self, lane: Lane, sequence: Sequence, num_leaving: int = 0) -> int:
        """Return the number of tokens for which pages must be available before a sequence starts.

        It includes one page for each running sequence. Otherwise, the new sequence could be preempted for their next
        tokens.
        """
        total = min(sequence.num_known + self._page_size, sequence.max_total_tokens)
        return total + self._page_size * (len(lane.running) - num_leaving)

    def _fits_without(self, lane: Lane, sequence: Sequence, leaving: list[Sequence]) -> bool:
        """Return whether a sequence could start in a lane if other sequences left.

        Pages that remaining sequences share stay.
        """
        if lane.closed or len(lane.running) - len(leaving) >= lane.max_running:
            return False
        staying = {
            page for s in lane.running if s not in leaving and s.pages is not None for page in s.pages.table[0].tolist()
        }
        freed = {page for s in leaving if s.pages is not None for page in s.pages.table[0].tolist()} - staying
        needed = self._cluster.dims.pages.pages_for(self._tokens_needed(lane, sequence, len(leaving)))
        return needed <= lane.cache.num_available_pages + len(freed)
