"""Plan that moves pieces of KV pages between ranks in phases. No piece is overwritten before it is read.

In a phase, all ranks gather the pieces that they send, exchange them, and then write the received pieces. All phases
have the same size.

A *slot* is the memory of one piece on one rank. A *move* copies a piece from a source slot to a target slot. If the
target slot is also the source of moves, these moves must run in an earlier phase or in the same phase. Two cases:

* Tree: the moves A -> B and B -> C, where C is a free slot. B -> C runs first, or both moves run in one phase.
* Cycle: the moves A -> B, B -> C, C -> D and D -> A. No slot is free, so all four moves must run in one phase.

A cycle with too many moves for a phase is cut into *arcs*, here (A, B) and (C, D). One phase rotates the pieces of each
arc: A and B trade their pieces, and C and D trade their pieces. Now B and D have the right pieces. The first slots of
the arcs, A and C, still must trade their pieces. This is a shorter cycle, which is planned in the same way. A plan
therefore never needs a free slot, even if all ranks are full.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

PADDING = -1
"""Id of an unused entry of `Phase.send` and `Phase.receive`."""

GENERAL_COST = 1.2
"""Time of a general phase, divided by the time of a phase with a distance.

In a general phase, each rank trades pieces with all ranks. In a phase with a distance, each rank trades with one rank.
The value was measured on CPU, where a general phase waits for other ranks several times.
"""


@dataclass(frozen=True)
class Phase:
    """Pieces of KV pages that the ranks exchange at once.

    The *distance* of ranks `r` and `s` is `r ^ s`. In a *general* phase, each rank exchanges pieces with all ranks. In
    a phase with a distance, each rank exchanges pieces only with the rank at this distance. `p` is the number of ranks,
    and `phase_pieces` is the argument of `plan_phases`. Unused ids in `send` and `receive` are `PADDING`.
    """

    send: Int32[np.ndarray, "p *pieces"]
    """Ids of the pieces that each rank sends.

    General phase: `[p, p, phase_pieces]`. Piece `send[r, i, n]` of rank `r` goes to slot `receive[r ^ i, i, n]` of rank
    `r ^ i`.

    Phase with a distance: `[p, p * phase_pieces]`. Piece `send[r, n]` of rank `r` goes to slot
    `receive[r ^ distance, n]` of rank `r ^ distance`.
    """
    receive: Int32[np.ndarray, "p *pieces"]
    """Ids of the slots to which the arriving pieces are written, with the shape of `send`."""
    distance: int | None = None
    """Distance of the ranks that exchange pieces; None for a general phase."""


def phase_shape(num_ranks: int, phase_pieces: int, distance: int | None) -> tuple[int, ...]:
    """Return the shape of `Phase.send` for one rank. `distance` is None for a general phase."""
    return (num_ranks, phase_pieces) if distance is None else (num_ranks * phase_pieces,)


def plan_phases(
    source: Int[np.ndarray, "M 2"], target: Int[np.ndarray, "M 2"], num_ranks: int, phase_pieces: int
) -> list[Phase]:
    """Plan the phases that copy each piece of a KV page from its source to its target. The phases must run in order.

    The distance of a move is the distance of its two ranks (`Phase`). If many moves have the same distance, they run in
    phases with this distance. All other moves run in general phases.

    A slot is the memory of one piece on one rank. A slot may be the source of several moves and also the target of a
    move. A slot that is not a target keeps its piece. The contents of the targets are valid only after the last phase.
    Temporary memory of a rank: at most `2 * num_ranks * phase_pieces` pieces, for sending and receiving together.

    Args:
        source: (rank, piece id) of the source slot of each piece.
        target: (rank, piece id) of the target slot of each piece. All targets differ. A target may equal its source.
        num_ranks: number of ranks (`p` of `Phase`).
        phase_pieces: number of pieces that a rank can send to each rank, including itself, in a general phase. In a
            phase with a distance, a rank can send `num_ranks` times as many pieces to one rank. The minimum is 2, so
            that two pieces of one rank can trade slots.

    Raises `ValueError` for a negative id, an unknown rank, equal targets, or `phase_pieces` below 2.
    """
    _check(source, target, num_ranks, phase_pieces)
    if not len(source):
        return []
    num_ids = int(max(source[:, 1].max(), target[:, 1].max())) + 1
    sources = source[:, 0].astype(np.int64) * num_ids + source[:, 1]
    targets = target[:, 0].astype(np.int64) * num_ids + target[:, 1]
    if len(np.unique(targets)) < len(targets):
        raise ValueError("two moves have the same target")

    refill, depth, cyclic = _dependencies(sources, targets, num_ranks * num_ids)
    # The moves with the longest chains of waiting moves come first.
    order = np.argsort(-depth, kind="stable")
    new_index = np.empty_like(order)
    new_index[order] = np.arange(len(order))
    refill = np.where(refill[order] < 0, -1, new_index[refill[order]])
    sources, targets, cyclic = sources[order], targets[order], cyclic[order]

    table = _Timetable(num_ranks, num_ids, phase_pieces)
    phases = table.enter_trees(sources, targets, refill, cyclic)
    tree = ~cyclic
    # A slot on a cycle may be written once all copies of its piece to slots outside of the cycle have left.
    last_copy: dict[int, int] = {}
    for move in np.flatnonzero(tree & (refill >= 0) & cyclic[refill]).tolist():
        slot = int(sources[move])
        last_copy[slot] = max(phases[move], last_copy.get(slot, 0))
    swaps, swapped = table.enter_swaps(sources, targets, cyclic & ~np.isin(sources, list(last_copy)))
    cyclic &= ~swapped
    turns = table.enter_cycles(dict(zip(sources[cyclic].tolist(), targets[cyclic].tolist(), strict=True)), last_copy)

    moves = np.stack([sources[tree], targets[tree], np.array(phases, np.int64)[tree]], axis=1)
    return _phases(np.concatenate([moves, swaps, turns]), num_ranks, num_ids, phase_pieces, table.distances)


def _check(source: np.ndarray, target: np.ndarray, num_ranks: int, phase_pieces: int) -> None:
    if phase_pieces < 2:
        raise ValueError(f"phase_pieces is {phase_pieces}; it must be at least 2")
    for name, slots in (("source", source), ("target", target)):
        if len(slots) and (slots.min() < 0 or slots[:, 0].max() >= num_ranks):
            raise ValueError(
                f"the {name}s have ranks up to {slots[:, 0].max()} and numbers from {slots.min()}: "
                f"ranks must be below {num_ranks}, and no number negative"
            )


def _dependencies(
    sources: Int64[np.ndarray, " M"], targets: Int64[np.ndarray, " M"], num_slots: int
) -> tuple[Int64[np.ndarray, " M"], Int64[np.ndarray, " M"], Bool[np.ndarray, " M"]]:
    """Find which moves wait for which other moves. Return three arrays with an entry for each move:

    * `refill`: index of the move that writes the source slot of this move, or -1. That move must wait for this move.
    * `depth`: number of moves that wait for this move, directly or through other moves. The number has no meaning if
      one of these moves is on a cycle.
    * `cyclic`: whether this move is on a cycle.

    Args:
        sources: slot number of the source of each move (`_Timetable` defines slot numbers).
        targets: slot number of the target of each move.
        num_slots: number of slots of all ranks together.
    """
    num_moves = len(sources)
    into = np.full(num_slots, num_moves)
    into[targets] = np.arange(num_moves)
    refill = into[sources]
    # Pointer doubling: iteration k follows 2**k steps. Chains end after at most `num_moves` steps, cycles never do.
    jump = np.append(refill, num_moves)
    depth = (jump < num_moves).astype(np.int64)
    for _ in range(num_moves.bit_length()):
        depth += depth[jump]
        jump = jump[jump]
    cyclic = np.zeros(num_moves, bool)
    cyclic[jump[jump < num_moves]] = True
    return np.where(refill < num_moves, refill, -1), depth[:-1], cyclic


class _Timetable:
    """Phases planned so far, with their remaining capacity for each pair of ranks.

    Slots, pairs of ranks and phases are represented by numbers. The number of a slot is `rank * num_ids + piece id`.
    The number of a pair is `sending rank * num_ranks + receiving rank`. The number of a phase is its index in the plan.
    """

    def __init__(self, num_ranks: int, num_ids: int, phase_pieces: int) -> None:
        self._num_ranks = num_ranks
        self._num_ids = num_ids
        self._phase_pieces = phase_pieces
        self.distances: list[int | None] = []  # of each phase
        self._free: list[list[int]] = []  # [phase][pair]
        # By (pair, count): all earlier phases have fewer than `count` free entries of the pair.
        self._first_with_free: dict[tuple[int, int], int] = {}

    def _add_phase(self, distance: int | None = None) -> list[int]:
        p = self._num_ranks
        free = [self._phase_pieces] * p**2
        if distance is not None:
            free = [0] * p**2
            for rank in range(p):
                free[rank * p + (rank ^ distance)] = p * self._phase_pieces
        self.distances.append(distance)
        self._free.append(free)
        return free

    def _best_distance(self, queues: list[list[int]]) -> int | None:
        """Return the distance at which the next phase moves the most pieces. Return None if a general phase is better.

        `queues[pair]` has the ready moves of a pair of ranks. A move is ready if it waits for no other move.
        """
        p, most = self._num_ranks, self._phase_pieces
        # Below this number a general phase is better: chains of waiting moves need fewer general phases.
        best, best_distance = p * most // 2, None
        for distance in range(p):
            count = sum(min(len(queues[rank * p + (rank ^ distance)]), p * most) for rank in range(p))
            if count > best:
                best, best_distance = count, distance
        if best_distance is not None and sum(min(len(queue), most) for queue in queues) > GENERAL_COST * best:
            return None
        return best_distance

    def enter_trees(
        self,
        sources: Int64[np.ndarray, " M"],
        targets: Int64[np.ndarray, " M"],
        refill: Int64[np.ndarray, " M"],
        cyclic: Bool[np.ndarray, " M"],
    ) -> list[int]:
        """Choose the phase of each move that is not on a cycle. Moves with lower indices have priority.

        Return the index of the phase of each move, and 0 for a move on a cycle. `refill` and `cyclic` come from
        `_dependencies`.
        """
        refills = refill.tolist()
        on_cycle = cyclic.tolist()
        pairs = (sources // self._num_ids * self._num_ranks + targets // self._num_ids).tolist()
        waits_for = np.bincount(refill[refill >= 0], minlength=len(refill))
        waiting = waits_for.tolist()
        queues: list[list[int]] = [[] for _ in range(self._num_ranks**2)]
        for move in np.flatnonzero((waits_for == 0) & ~cyclic).tolist():
            queues[pairs[move]].append(move)  # in ascending order, so each queue is a heap

        phases = [0] * len(refills)
        while any(queues):
            free = self._add_phase(self._best_distance(queues))
            phase = len(self._free) - 1
            entered = True
            while entered:  # every entered move may make another one ready for the same phase
                entered = False
                for pair, queue in enumerate(queues):
                    while queue and free[pair]:
                        move = heapq.heappop(queue)
                        phases[move] = phase
                        free[pair] -= 1
                        entered = True
                        later = refills[move]
                        if later >= 0:
                            waiting[later] -= 1
                            if not waiting[later] and not on_cycle[later]:
                                heapq.heappush(queues[pairs[later]], later)
        return phases

    def enter_swaps(
        self, sources: Int64[np.ndarray, " M"], targets: Int64[np.ndarray, " M"], which: Bool[np.ndarray, " M"]
    ) -> tuple[Int64[np.ndarray, "rows 3"], Bool[np.ndarray, " M"]]:
        """Choose the phases of swaps: pairs of moves that trade slots. Merges and splits consist mostly of swaps.

        The mask `which` selects the moves to consider. If the last swaps of a distance would fill only a small part of
        a phase, they get no phase here. Return rows `[source slot, target slot, phase]` of the moves that got a phase,
        and a mask of these moves.
        """
        p, entered = self._num_ranks, np.zeros(len(sources), bool)
        into = np.full(p * self._num_ids, -1)
        into[targets[which]] = np.flatnonzero(which)
        back = into[sources]
        first = np.flatnonzero(which & (back >= 0) & (sources < targets))
        first = first[sources[back[first]] == targets[first]]
        # Sorted by pair of ranks: the first `room` swaps of each pair go into the first phase of their distance, the
        # next ones into the second phase.
        ranks, peers = sources // self._num_ids, targets // self._num_ids
        pairs = (ranks ^ peers)[first] * p + ranks[first]
        order = np.argsort(pairs, kind="stable")
        first, pairs = first[order], pairs[order]
        place = np.arange(len(first)) - np.searchsorted(pairs, pairs)
        found = []
        for distance in range(p):
            mine, places = first[pairs // p == distance], place[pairs // p == distance]
            room = p * self._phase_pieces // (2 if distance == 0 else 1)
            full, rest = divmod(int(places.max(initial=-1)) + 1, room)
            for n in range(full + (rest > self._phase_pieces)):
                here = mine[places // room == n]
                both = np.concatenate([here, back[here]])
                free = self._add_phase(distance)
                for pair, count in enumerate(np.bincount(ranks[both] * p + peers[both], minlength=p * p).tolist()):
                    free[pair] -= count
                found.append(np.stack([sources[both], targets[both], np.full(len(both), len(self._free) - 1)], axis=1))
                entered[both] = True
        return np.concatenate([np.zeros((0, 3), np.int64), *found]), entered

    def enter_cycles(self, following: dict[int, int], ready: dict[int, int]) -> Int64[np.ndarray, "rows 3"]:
        """Choose the phases of the moves on cycles. Return rows `[source slot, target slot, phase]`.

        A long cycle is cut into arcs, and their first slots form a shorter cycle (see the module docstring).

        Args:
            following: next slot on the cycle, by slot. This method empties the dict.
            ready: index of the first phase that may write a slot, by slot. Default: 0. This method updates the dict.
        """
        # Arcs are small compared with a phase, so that they fill it well.
        limit = max(2, self._phase_pieces // 8)
        moves: list[tuple[int, int, int]] = []
        cycles: Iterable[list[int]] = _cycles(following)
        while cycles:
            shorter = []
            for cycle in cycles:
                heads = []
                for arc, counts in self._arcs(cycle, limit):
                    heads.append(arc[0])
                    if len(arc) == 1:
                        continue
                    phase = self._enter(counts, max(ready.get(slot, 0) for slot in arc))
                    moves += [(a, b, phase) for a, b in zip(arc, arc[1:] + arc[:1], strict=True)]
                    ready[arc[0]] = phase + 1
                if len(heads) > 1:
                    shorter.append(heads)
            cycles = shorter
        return np.array(moves, np.int64).reshape(-1, 3)

    def _arcs(self, cycle: list[int], limit: int) -> Iterator[tuple[list[int], dict[int, int]]]:
        """Cut a cycle of slots into arcs (runs of slots). In an arc, each pair of ranks has at most `limit` moves.

        Yield `(slots, counts)` for each arc. `counts` has the number of moves of each pair of ranks, including the move
        from the last slot of the arc to its first slot. Each arc except the last has at least two slots.
        """
        ranks = [slot // self._num_ids for slot in cycle]
        arc, counts = [cycle[0]], Counter[int]()
        first_rank = last_rank = ranks[0]
        for slot, rank in zip(cycle[1:], ranks[1:], strict=True):
            step = last_rank * self._num_ranks + rank
            closing = rank * self._num_ranks + first_rank
            last_rank = rank
            if counts[step] + (step == closing) < limit and counts[closing] < limit:
                arc.append(slot)
                counts[step] += 1
                continue
            yield arc, self._closed(arc, counts)
            arc, counts = [slot], Counter[int]()
            first_rank = rank
        yield arc, self._closed(arc, counts)

    def _closed(self, arc: list[int], counts: Counter[int]) -> dict[int, int]:
        counts[arc[-1] // self._num_ids * self._num_ranks + arc[0] // self._num_ids] += 1
        return counts

    def _enter(self, counts: dict[int, int], phase: int) -> int:
        """Reserve capacity in one phase for `counts[pair]` moves of each pair of ranks. Return the index of the phase.

        The first phase with enough capacity is chosen, from index `phase` on. If there is none, a new phase is added.
        """
        for pair, count in counts.items():
            first = self._first_with_free.get((pair, count), 0)
            while first < len(self._free) and self._free[first][pair] < count:
                first += 1
            self._first_with_free[pair, count] = first
            phase = max(phase, first)
        while phase < len(self._free) and any(self._free[phase][pair] < count for pair, count in counts.items()):
            phase += 1
        while phase >= len(self._free):
            self._add_phase()
        for pair, count in counts.items():
            self._free[phase][pair] -= count
        return phase


def _cycles(following: dict[int, int]) -> Iterator[list[int]]:
    """Yield the slots of each cycle with at least two slots, in order.

    `following` maps each slot to the next slot of its cycle. This function empties `following`.
    """
    while following:
        start, slot = following.popitem()
        cycle = [start]
        while slot != start:
            cycle.append(slot)
            slot = following.pop(slot)
        if len(cycle) > 1:
            yield cycle


def _phases(
    moves: Int64[np.ndarray, "rows 3"], num_ranks: int, num_ids: int, phase_pieces: int, distances: list[int | None]
) -> list[Phase]:
    """Build the phases of a plan from its moves.

    Args:
        moves: rows `[source slot, target slot, phase]`. The number of a slot is `rank * num_ids + piece id`, and
            `phase` is an index in `distances`.
        num_ranks: number of ranks.
        num_ids: factor of the rank in the number of a slot. All piece ids are below this factor.
        phase_pieces: argument of `plan_phases`.
        distances: distance of each phase; None for a general phase.
    """
    from_rank, source = np.divmod(moves[:, 0], num_ids)
    to_rank, target = np.divmod(moves[:, 1], num_ids)
    phase = moves[:, 2]
    group = (phase * num_ranks + from_rank) * num_ranks + to_rank
    order = np.argsort(group, kind="stable")
    first = np.searchsorted(group[order], group[order])
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - first
    general = np.array([distance is None for distance in distances], bool)[phase]
    place += np.where(general, (from_rank ^ to_rank) * phase_pieces, 0)
    send, receive = np.full((2, len(distances), num_ranks, num_ranks * phase_pieces), PADDING, np.int32)
    send[phase, from_rank, place] = source
    receive[phase, to_rank, place] = target
    phases = []
    for index, distance in enumerate(distances):
        shape = (num_ranks, *phase_shape(num_ranks, phase_pieces, distance))
        phases.append(Phase(send[index].reshape(shape), receive[index].reshape(shape), distance))
    return phases
