"""Where a waiting sequence can run, and who would have to make room for it. Changes nothing."""

from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence

# What a running sequence weighs, in prompt tokens to compute, when an instance is chosen for the next one.
_DECODE_COST = 16


class Room:
    """Looks for room in a cluster's instances. Used by the dispatcher thread only."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._page_size = cluster.dims.page_size

    def home(self, sequence: Sequence) -> Instance:
        """The instance that has a sequence, running or paused."""
        return next(instance for instance in self._cluster.all_instances if sequence in instance.running)

    def leader_home(self, sequence: Sequence) -> Instance | None:
        """Where a sibling can share the pages of its leader's prompt: one page more, a copy of the last, is enough."""
        leader = sequence.leader
        if leader is None or sequence.num_generated or leader.slot < 0 or leader.num_computed < len(leader.prompt):
            return None
        home = self.home(leader)
        if home not in self._cluster.instances:
            return None  # it is paused
        lane = home.lane_of(leader)
        return home if lane.has_free_slot and lane.cache.num_available_pages > 0 else None

    def reusable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the pages that a sequence may take from the cache: all but the last token, which is computed."""
        if sequence.needs_prompt_logits:
            return []
        assert sequence.page_keys is not None
        sequence.page_keys.extend(sequence.tokens(sequence.page_keys.num_tokens, sequence.num_known))
        return sequence.page_keys.keys[: (sequence.num_known - 1) // self._page_size]

    def lane_for(self, instance: Instance, sequence: Sequence) -> Lane | None:
        """The lane of an instance that could start a sequence right now, and has most room; None if there is none."""
        if self.leader_home(sequence) is instance:
            assert sequence.leader is not None, "it has a home"
            return instance.lane_of(sequence.leader)
        keys = self.reusable_keys(sequence)
        fitting = [
            lane
            for lane in instance.lanes
            if lane.has_free_slot
            and sequence.max_total_tokens <= lane.capacity_tokens
            and lane.cache.fits(keys, sequence.num_known)
        ]
        return max(fitting, key=lambda lane: lane.cache.num_available_pages, default=None)

    def choose(self, sequence: Sequence) -> tuple[Instance, Lane] | None:
        """The instance, and its lane, that can take a sequence and has the least to compute before and beside it."""
        if (home := self.leader_home(sequence)) is not None:
            assert sequence.leader is not None, "it has a home"
            return home, home.lane_of(sequence.leader)
        keys = self.reusable_keys(sequence)
        best: tuple[tuple[int, int, int], Instance, Lane] | None = None
        for instance, number, lane in self._suitable(sequence):
            if lane.has_free_slot and lane.cache.fits(keys, self._tokens_needed(lane, sequence)):
                new = sequence.num_known - lane.cache.num_cached(keys) * self._page_size
                backlog = sum(s.num_uncomputed_tokens for s in lane.running)
                cost = new + backlog + _DECODE_COST * len(lane.running), instance.id, number
                if best is None or cost < best[0]:
                    best = cost, instance, lane
        return best[1:] if best else None

    def victims(self, sequence: Sequence) -> tuple[Instance, list[Sequence]] | None:
        """An instance, and sequences there that rank behind `sequence`, the last in order first, that would have
        to be preempted for it to start; None where no preemption would make enough room.

        Before them those that are paused, unless they rank before `sequence`.

        Of several instances, the one whose victims are the last in order.
        """
        found: list[tuple[list[tuple[int, ...]], Instance, list[Sequence]]] = []
        for instance, _, lane in self._suitable(sequence):
            lower = [s for s in lane.running if s.rank > sequence.rank and not s.finished]
            lower.sort(key=lambda s: s.order, reverse=True)
            if instance.paused and instance.transition is None and lane.has_free_slot:
                needed = self._cluster.dims.pages.pages_for(self._tokens_needed(lane, sequence))
                if paused := instance.paused_in_the_way(needed, sequence.rank):
                    found.append(([paused[-1].order, (-len(paused),)], instance, paused))
                    continue
            for count in range(1, len(lower) + 1):
                if self._fits_without(lane, sequence, lower[:count]):
                    # The most important of the victims decides, then how many they are.
                    orders = [lower[count - 1].order, (-count,)]
                    found.append((orders, instance, lower[:count]))
                    break
        if not found:
            return None
        _, instance, victims = max(found, key=lambda item: (item[0], -item[1].id))
        return instance, victims

    def _suitable(self, sequence: Sequence) -> list[tuple[Instance, int, Lane]]:
        """Lanes that are large enough, with their instance and their number there."""
        return [
            (instance, number, lane)
            for instance in self._cluster.instances
            for number, lane in enumerate(instance.lanes)
            if lane.capacity_tokens >= sequence.max_total_tokens
        ]

    def _tokens_needed(self, lane: Lane, sequence: Sequence, num_leaving: int = 0) -> int:
        """Tokens for which pages should be there: a page more for everyone who runs, so that it isn't preempted for
        their next token."""
        total = min(sequence.num_known + self._page_size, sequence.max_total_tokens)
        return total + self._page_size * (len(lane.running) - num_leaving)

    def _fits_without(self, lane: Lane, sequence: Sequence, leaving: list[Sequence]) -> bool:
        """Whether a sequence could start if those left. Their pages are available then, but for shared ones."""
        if lane.closed or len(lane.running) - len(leaving) >= lane.max_running:
            return False
        staying = {
            page for s in lane.running if s not in leaving and s.pages is not None for page in s.pages.table[0].tolist()
        }
        freed = {page for s in leaving if s.pages is not None for page in s.pages.table[0].tolist()} - staying
        needed = self._cluster.dims.pages.pages_for(self._tokens_needed(lane, sequence, len(leaving)))
        return needed <= lane.cache.num_available_pages + len(freed)
