"""Assignment of sequences to the instances that result when a group of devices splits."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

from kvcache.allocator import OutOfPagesError


def assign_down(
    pages: Sequence[Int[np.ndarray, " _"]],
    room: Sequence[int],
    *,
    staying: Sequence[Int[np.ndarray, " _"]] | None = None,
    limit: int | Sequence[int] | None = None,
) -> Int32[np.ndarray, " sequences"]:
    """Choose an instance for each sequence when a group of devices splits. Return the indices of these instances.

    The longest sequence is assigned first. Each sequence goes to the instance with the most free pages. If sequences
    with a common page go to different instances, each of these instances needs a copy of the page.

    If the sequences do not fit this way, sequences with common pages are put on the same instance. This is not the
    first choice, because it puts all sequences on one instance if all prompts begin with the same system prompt.

    Args:
        pages: ids of the pages of each sequence, for example on rank 0. Equal ids mean the same page. Cached pages that
            no sequence uses are not included.
        room: number of free pages of each instance, in pages of the lower degree.
        staying: for each sequence, the number of its page pieces that could stay in place on each instance
            (`relayout.staying_pieces`). If given, another attempt is made first: each sequence is put on the instance
            with the highest number, and then sequences are moved to balance the free pages of the instances.
        limit: maximum number of sequences of an instance: one number, or a list by instance. None: no limit.

    Raises `OutOfPagesError` if no assignment is found. The search is greedy and may miss an assignment that exists.
    """
    numbers, index = np.unique(np.concatenate([np.zeros(0, np.int64), *pages]), return_inverse=True)
    ends = list(itertools.accumulate(len(p) for p in pages))
    pages = np.split(index, ends)[: len(pages)]
    most = list(limit) if isinstance(limit, Sequence) else [len(pages) if limit is None else limit] * len(room)
    if staying is not None:
        assignment = _assign_staying(pages, len(numbers), room, staying, most)
        if assignment is not None:
            return assignment
    singles = [[sequence] for sequence in range(len(pages))]
    attempts: list[tuple[_Preference, list[list[int]]]] = [
        (lambda free, need: (-free, need), singles),
        (lambda free, need: (need, -free), _sharing(pages)),
        (lambda free, need: (free - need, need), singles),
    ]
    for preference, groups in attempts:
        assignment = _assign(pages, len(numbers), room, groups, preference, most)
        if assignment is not None:
            return assignment
    raise OutOfPagesError(
        f"{len(pages)} sequences with {len(numbers)} pages together, {max(len(p) for p in pages)} the longest, "
        f"do not fit into {len(room)} instances with room for {list(room)} pages"
        + (f" and for {most} sequences" if limit is not None else "")
    )


_Preference = Callable[[int, int], tuple[int, int]]
"""Function `(free, need) -> cost`: the cost of an instance for a group of sequences.

`free` is the number of free pages of the instance. `need` is the number of new pages that the group needs on this
instance. A group of sequences goes to the instance with the lowest cost.
"""


def _assign(
    pages: Sequence[Int[np.ndarray, " _"]],
    num_pages: int,
    room: Sequence[int],
    groups: list[list[int]],
    preference: _Preference,
    limit: list[int],
) -> Int32[np.ndarray, " sequences"] | None:
    """Assign each group of sequences to an instance, largest group first. Return the instance of each sequence.

    If a group does not fit into one instance, its sequences are assigned one by one. If a sequence fits into no
    instance, return None.

    Args:
        pages: distinct pages of each sequence, as numbers in `range(num_pages)`.
        num_pages: number of distinct pages of all sequences together.
        room: number of free pages of each instance.
        groups: indices of the sequences of each group.
        preference: cost of an instance for a group (`_Preference`). A group goes to the instance with the lowest cost.
        limit: maximum number of sequences of each instance.
    """
    free, left = list(room), list(limit)
    held = np.zeros((len(room), num_pages), bool)
    assignment = np.zeros(len(pages), np.int32)

    def assign(group: list[int], needed: Int[np.ndarray, " _"]) -> bool:
        need = (~held[:, needed]).sum(axis=1).tolist()
        fitting = [i for i in range(len(room)) if need[i] <= free[i] and len(group) <= left[i]]
        if not fitting:
            return False
        best = min(fitting, key=lambda i: preference(free[i], need[i]))
        free[best] -= need[best]
        left[best] -= len(group)
        held[best, needed] = True
        assignment[group] = best
        return True

    needs = [np.unique(np.concatenate([pages[sequence] for sequence in group])) for group in groups]
    for group, needed in sorted(zip(groups, needs, strict=True), key=lambda item: -len(item[1])):
        if not assign(group, needed):
            one_by_one = sorted(group, key=lambda sequence: -len(pages[sequence]))
            if len(group) == 1 or not all(assign([sequence], pages[sequence]) for sequence in one_by_one):
                return None
    return assignment


def _assign_staying(
    pages: Sequence[Int[np.ndarray, " _"]],
    num_pages: int,
    room: Sequence[int],
    staying: Sequence[Int[np.ndarray, " _"]],
    limit: list[int],
) -> Int32[np.ndarray, " sequences"] | None:
    """Assign each sequence to the instance on which most pieces of its pages stay in place.

    Then move sequences to balance the free pages of the instances. The arguments are as in `_assign` and `assign_down`.
    Return None if the balanced assignment does not fit.
    """
    if not pages:
        return np.zeros(0, np.int32)
    state = _Staying(pages, num_pages, np.asarray(room), np.stack(staying), limit)
    while (move := state.next_move()) is not None:
        state.move(*move)
    return state.assignment if state.fits else None


class _Staying:
    """Assignment of sequences to instances, improved by moving one sequence at a time.

    At first, every sequence is on the instance where most pieces of its pages stay in place. A move goes to the
    instance with the most free pages, among the instances with fewer sequences than their limit.

    The moves come to an end, because every move helps. If the source instance is above its limit, it loses a sequence.
    If not, both instances have more free pages after the move than the source instance had before the move.
    """

    def __init__(
        self,
        pages: Sequence[Int[np.ndarray, " _"]],
        num_pages: int,
        room: Int[np.ndarray, " k"],
        staying: Int[np.ndarray, "sequences k"],
        limit: list[int],
    ) -> None:
        self.assignment = np.argmax(staying, axis=1).astype(np.int32)
        self._pages, self._room, self._staying, self._limit = pages, room, staying, np.array(limit)
        self._lengths = np.array([len(own) for own in pages])
        self._all = np.concatenate(pages)
        self._ends = np.cumsum(self._lengths)
        # [instances, pages]: number of sequences on the instance that use the page.
        self._users = np.zeros((len(room), num_pages), np.int64)
        for own, instance in zip(pages, self.assignment, strict=True):
            self._users[instance, own] += 1

    @property
    def _free(self) -> Int64[np.ndarray, " k"]:
        return self._room - np.count_nonzero(self._users, axis=1)

    @property
    def _counts(self) -> Int64[np.ndarray, " k"]:
        return np.bincount(self.assignment, minlength=len(self._room))

    @property
    def fits(self) -> bool:
        return bool((self._free >= 0).all() and (self._counts <= self._limit).all())

    def move(self, sequence: int, instance: int) -> None:
        own = self._pages[sequence]
        self._users[self.assignment[sequence], own] -= 1
        self._users[instance, own] += 1
        self.assignment[sequence] = instance

    def next_move(self) -> tuple[int, int] | None:
        """Return the next sequence to move and its new instance. Return None if no move is needed or possible."""
        free, counts = self._free, self._counts
        open_to = np.flatnonzero(counts < self._limit)
        if not len(open_to):
            return None
        to = int(open_to[np.argmax(free[open_to])])
        # Instances with too many sequences come first, then the fullest.
        for instance in np.lexsort((free, counts <= self._limit)).tolist():
            own = np.flatnonzero(self.assignment == instance)
            if instance == to or not len(own):
                continue
            crowded, difference = counts[instance] > self._limit[instance], free[to] - free[instance]
            if not crowded and free[instance] >= 0 and difference <= self._lengths[own].max():
                continue
            gain = self._per_sequence(self._users[instance] == 1)[own]
            need = self._per_sequence(self._users[to] == 0)[own]
            lost = self._staying[own, instance] - self._staying[own, to]
            candidates = np.flatnonzero(crowded | ((gain > 0) & (need < difference)))
            if len(candidates):
                after = np.abs(difference - need - gain)
                return int(own[candidates[np.lexsort((lost[candidates], after[candidates]))[0]]]), to
        return None

    def _per_sequence(self, flags: Bool[np.ndarray, " _"]) -> Int64[np.ndarray, " sequences"]:
        """Count, for each sequence, the pages with a set flag. `flags` has one flag for each page."""
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(flags[self._all])])
        return sums[self._ends] - sums[self._ends - self._lengths]


def _sharing(pages: Sequence[Int[np.ndarray, " _"]]) -> list[list[int]]:
    """Group the sequences so that no two groups share a page. Return the indices of the sequences of each group."""
    leader = list(range(len(pages)))

    def find(sequence: int) -> int:
        while leader[sequence] != sequence:
            leader[sequence] = sequence = leader[leader[sequence]]
        return sequence

    first_user: dict[int, int] = {}
    for sequence, own in enumerate(pages):
        for page in own.tolist():
            leader[find(sequence)] = find(first_user.setdefault(page, sequence))
    groups: dict[int, list[int]] = {}
    for sequence in range(len(pages)):
        groups.setdefault(find(sequence), []).append(sequence)
    return list(groups.values())
