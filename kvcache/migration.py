"""Plans the order in which pieces of pages move between ranks, so that none is overwritten before it was read.

Pieces move in phases of a fixed size, each one run of one compiled program: all ranks gather what they send, exchange
it, and then write what they received. So a slot (a place for one piece on one rank) whose piece leaves in a phase may
be written in that phase, and a move waits for those that vacate its target, in the same phase at the latest.

Each slot is the target of one move at most, so moves form trees, which end in slots that are free, and cycles. A tree
is done from its ends. A cycle must turn in one phase; where it is too long, it is cut into arcs that turn each by
itself. That puts all pieces but the last of each arc into place, and the last ones, which are then at the first slots
of their arcs, form a cycle of that many slots fewer. So no plan needs a free slot, however full the ranks are.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

PADDING = -1
"""Id in `Phase.send` and `Phase.receive` where there is no piece."""

GENERAL_COST = 1.2
"""Time of a phase in which each rank trades with all, in that of one in which each trades with one other.

As measured on CPU: it waits for its peers several times."""


@dataclass(frozen=True)
class Phase:
    """What the ranks exchange at once: each with all, or each with one other. Ranks `r` and `r ^ i` are `i` apart.

    `K` is `phase_pieces`, the same in all phases of a plan. Both arrays are padded with `PADDING`, at the same places.
    """

    send: Int32[np.ndarray, "p *pieces"]
    """Ids of pieces. `[p, p, K]`: `send[r, i, n]` on rank `r` goes to `receive[r ^ i, i, n]`, `i = 0` being the rank
    itself. With a distance `[p, p * K]`: `send[r, n]` goes to `receive[r ^ distance, n]`."""
    receive: Int32[np.ndarray, "p *pieces"]
    """Ids of where they are put."""
    distance: int | None = None
    """How far those are apart that trade, if each rank trades with one."""


def phase_shape(num_ranks: int, phase_pieces: int, distance: int | None) -> tuple[int, ...]:
    """Shape of one rank's part of a phase's ids."""
    return (num_ranks, phase_pieces) if distance is None else (num_ranks * phase_pieces,)


def plan_phases(
    source: Int[np.ndarray, "M 2"], target: Int[np.ndarray, "M 2"], num_ranks: int, phase_pieces: int
) -> list[Phase]:
    """Phases that, run in order, put a copy of the piece at each source to its target.

    Where enough pieces can go between the same pairs of ranks, a phase is theirs alone: it takes more of them, in less
    time. Phases in which each rank trades with all take what is few, and what waits for one another.

    A source may have several targets, and be a target of another piece. Slots that are no target keep their piece.
    Slots that are a source and a target may hold others' pieces between phases; all other slots are written once.
    A rank holds at most `2 * num_ranks * phase_pieces` pieces besides, those it sends and those it receives.

    Args:
        source: (rank, piece id) of each piece.
        target: (rank, piece id) of where it goes, all different. May be equal to its source.
        num_ranks: `p` of the phases.
        phase_pieces: `K` of the phases: pieces from one rank to another (or itself) in one phase; at least 2, so that
            two pieces of one rank can change places.

    Raises `ValueError` for arguments that are not so. No set of moves is refused.
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
    # The moves that most others wait for come first.
    order = np.argsort(-depth, kind="stable")
    new_index = np.empty_like(order)
    new_index[order] = np.arange(len(order))
    refill = np.where(refill[order] < 0, -1, new_index[refill[order]])
    sources, targets, cyclic = sources[order], targets[order], cyclic[order]

    table = _Timetable(num_ranks, num_ids, phase_pieces)
    phases = table.enter_trees(sources, targets, refill, cyclic)
    tree = ~cyclic
    # A slot on a cycle turns when the copies of its piece that leave the cycle are gone.
    last_copy: dict[int, int] = {}
    for move in np.flatnonzero(tree & (refill >= 0) & cyclic[refill]).tolist():
        slot = int(sources[move])
        last_copy[slot] = max(phases[move], last_copy.get(slot, 0))
    swaps, swapped = table.enter_swaps(sources, targets, cyclic & ~np.isin(sources, list(last_copy)))
    cyclic &= ~swapped
    turns = table.enter_cycles(dict(zip(sources[cyclic].tolist(), targets[cyclic].tolist(), strict=True)), last_copy)

    moves = np.stack([sources[tree], targets[tree], np.array(phases, np.int64)[tree]], axis=1)
    return _phases(np.concatenate([moves, swaps, turns]), num_ranks, num_ids, phase_pieces, table.distances)


def single_phase(
    source: Int[np.ndarray, "M 2"], target: Int[np.ndarray, "M 2"], num_ranks: int, phase_pieces: int
) -> Phase:
    """All moves at once, for pieces that are written elsewhere than they are read. Arguments as of `plan_phases`.

    Raises `ValueError` where more than `phase_pieces` go from one rank to another.
    """
    _check(source, target, num_ranks, phase_pieces)
    counts = np.bincount(source[:, 0] * num_ranks + target[:, 0], minlength=1)
    if counts.max() > phase_pieces:
        raise ValueError(f"{counts.max()} pieces go from one rank to another, and a phase has {phase_pieces}")
    num_ids = int(max(source[:, 1].max(initial=0), target[:, 1].max(initial=0))) + 1
    slots = (source[:, 0] * num_ids + source[:, 1], target[:, 0] * num_ids + target[:, 1])
    moves = np.stack([*slots, np.zeros(len(source), np.int64)], axis=1).astype(np.int64)
    phases = _phases(moves, num_ranks, num_ids, phase_pieces, [None] * (int(moves[:, 2].max(initial=-1)) + 1))
    nothing = np.full((num_ranks, *phase_shape(num_ranks, phase_pieces, None)), PADDING, np.int32)
    return phases[0] if phases else Phase(nothing, nothing.copy())


def _check(source: np.ndarray, target: np.ndarray, num_ranks: int, phase_pieces: int) -> None:
    if phase_pieces < 2:
        raise ValueError(f"phase_pieces is {phase_pieces}; it must be at least 2")
    for name, slots in (("source", source), ("target", target)):
        if len(slots) and (slots.min() < 0 or slots[:, 0].max() >= num_ranks):
            raise ValueError(f"a {name} has a negative id or a rank that is not one of {num_ranks}")


def _dependencies(
    sources: Int64[np.ndarray, " M"], targets: Int64[np.ndarray, " M"], num_slots: int
) -> tuple[Int64[np.ndarray, " M"], Int64[np.ndarray, " M"], Bool[np.ndarray, " M"]]:
    """For each move: the one that refills its source or -1, how many wait for it in a row, and if it is on a cycle.

    A move waits for those out of its target, so the one that refills a slot waits for those that vacate it.
    """
    num_moves = len(sources)
    into = np.full(num_slots, num_moves)
    into[targets] = np.arange(num_moves)
    refill = into[sources]
    # 2**k steps at once. Who is still somewhere after more steps than there are moves is on a cycle by then.
    jump = np.append(refill, num_moves)
    depth = (jump < num_moves).astype(np.int64)
    for _ in range(num_moves.bit_length()):
        depth += depth[jump]
        jump = jump[jump]
    cyclic = np.zeros(num_moves, bool)
    cyclic[jump[jump < num_moves]] = True
    return np.where(refill < num_moves, refill, -1), depth[:-1], cyclic


class _Timetable:
    """The room that is left in each phase between each pair of ranks. A slot here is `rank * num_ids + piece id`."""

    def __init__(self, num_ranks: int, num_ids: int, phase_pieces: int) -> None:
        self._num_ranks = num_ranks
        self._num_ids = num_ids
        self._phase_pieces = phase_pieces
        self.distances: list[int | None] = []  # of each phase
        self._rooms: list[list[int]] = []  # [phase][pair]
        # First phase with room for that many pieces of a pair: (pair, count) -> phase.
        self._first_with_room: dict[tuple[int, int], int] = {}

    def _add_phase(self, distance: int | None = None) -> list[int]:
        p = self._num_ranks
        room = [self._phase_pieces] * p**2
        if distance is not None:
            room = [0] * p**2
            for rank in range(p):
                room[rank * p + (rank ^ distance)] = p * self._phase_pieces
        self.distances.append(distance)
        self._rooms.append(room)
        return room

    def _best_distance(self, queues: list[list[int]]) -> int | None:
        """The kind of phase that takes most of what could go now, in the time that it takes."""
        p, most = self._num_ranks, self._phase_pieces
        # What others wait for would pass through many phases of pairs, and through few in which all take part.
        best, kind = p * most // 2, None
        for distance in range(p):
            count = sum(min(len(queues[rank * p + (rank ^ distance)]), p * most) for rank in range(p))
            if count > best:
                best, kind = count, distance
        if kind is not None and sum(min(len(queue), most) for queue in queues) > GENERAL_COST * best:
            return None
        return kind

    def enter_trees(
        self,
        sources: Int64[np.ndarray, " M"],
        targets: Int64[np.ndarray, " M"],
        refill: Int64[np.ndarray, " M"],
        cyclic: Bool[np.ndarray, " M"],
    ) -> list[int]:
        """The phase of each move that is not on a cycle (0 for the others). Earlier moves go first where they can."""
        refills = refill.tolist()
        on_cycle = cyclic.tolist()
        pairs = (sources // self._num_ids * self._num_ranks + targets // self._num_ids).tolist()
        waits_for = np.bincount(refill[refill >= 0], minlength=len(refill))
        waiting = waits_for.tolist()
        queues: list[list[int]] = [[] for _ in range(self._num_ranks**2)]
        for move in np.flatnonzero((waits_for == 0) & ~cyclic).tolist():
            queues[pairs[move]].append(move)  # by rising move, so each queue is a heap

        phases = [0] * len(refills)
        while any(queues):
            room = self._add_phase(self._best_distance(queues))
            phase = len(self._rooms) - 1
            entered = True
            while entered:  # a move that is entered may let others in, in this same phase
                entered = False
                for pair, queue in enumerate(queues):
                    while queue and room[pair]:
                        move = heapq.heappop(queue)
                        phases[move] = phase
                        room[pair] -= 1
                        entered = True
                        later = refills[move]
                        if later >= 0:
                            waiting[later] -= 1
                            if not waiting[later] and not on_cycle[later]:
                                heapq.heappush(queues[pairs[later]], later)
        return phases

    def enter_swaps(
        self, sources: Int64[np.ndarray, " M"], targets: Int64[np.ndarray, " M"], which: Bool[np.ndarray, " M"]
    ) -> tuple[Int64[np.ndarray, "N 3"], Bool[np.ndarray, " M"]]:
        """Enters pairs of pieces that change places, among the moves `which` on cycles.

        A merge and a split in the same places are such swaps for the most part. Those that would not make up phases of
        their own are left. Returns moves `[source, target, phase]`, and which of all moves they are.
        """
        p, entered = self._num_ranks, np.zeros(len(sources), bool)
        into = np.full(p * self._num_ids, -1)
        into[targets[which]] = np.flatnonzero(which)
        back = into[sources]
        first = np.flatnonzero(which & (back >= 0) & (sources < targets))
        first = first[sources[back[first]] == targets[first]]
        # By pair of ranks: the first `room` of each go in its distance's first phase, and so on.
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
                left = self._add_phase(distance)
                for pair, count in enumerate(np.bincount(ranks[both] * p + peers[both], minlength=p * p).tolist()):
                    left[pair] -= count
                found.append(np.stack([sources[both], targets[both], np.full(len(both), len(self._rooms) - 1)], axis=1))
                entered[both] = True
        return np.concatenate([np.zeros((0, 3), np.int64), *found]), entered

    def enter_cycles(self, following: dict[int, int], ready: dict[int, int]) -> Int64[np.ndarray, "N 3"]:
        """The moves `[source, target, phase]` that turn the cycles `following` (slot -> slot; emptied here).

        `ready[slot]`, if given, is the first phase in which the slot may be written.
        """
        # Small against a phase, so that little room is left unused.
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
        """Cuts a cycle into arcs that have at most `limit` moves of each pair of ranks, and their numbers.

        The move from an arc's last slot to its first counts too. All arcs but the last have at least two slots.
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
        """The first phase, `phase` at the earliest, with room for that many pieces of each pair. Takes the room."""
        for pair, count in counts.items():
            first = self._first_with_room.get((pair, count), 0)
            while first < len(self._rooms) and self._rooms[first][pair] < count:
                first += 1
            self._first_with_room[pair, count] = first
            phase = max(phase, first)
        while phase < len(self._rooms) and any(self._rooms[phase][pair] < count for pair, count in counts.items()):
            phase += 1
        while phase >= len(self._rooms):
            self._add_phase()
        for pair, count in counts.items():
            self._rooms[phase][pair] -= count
        return phase


def _cycles(following: dict[int, int]) -> Iterator[list[int]]:
    """The cycles of `following` (slot -> slot), each as its slots in order. Empties it."""
    while following:
        start, slot = following.popitem()
        cycle = [start]
        while slot != start:
            cycle.append(slot)
            slot = following.pop(slot)
        if len(cycle) > 1:
            yield cycle


def _phases(
    moves: Int64[np.ndarray, "N 3"], num_ranks: int, num_ids: int, phase_pieces: int, distances: list[int | None]
) -> list[Phase]:
    """The phases of moves `[source, target, phase]`."""
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
