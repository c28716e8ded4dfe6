"""Fair shares of slots and pages: while several clients have requests, none takes all that the instances hold."""

from collections import defaultdict
from collections.abc import Collection, Iterable

from amoeba_jax.instances.sequence import Sequence


def mark_beyond_share(
    running: Collection[Sequence], waiting: Iterable[Sequence], num_slots: int, num_tokens: int
) -> list[Sequence]:
    """Set `Sequence.beyond_share` of all sequences. Return those of which it has changed.

    With N clients, a client's share is an N-th of the slots and of the tokens that all instances hold. Its running
    sequences take of that first, then those that wait, each in order; what exceeds it is beyond its share. Its first
    sequence never is, whatever its size, so that a request of any length can end. The share of a client that has no
    requests is everyone's: of one client alone nothing is beyond it.
    """
    present = [s for sequences in (running, waiting) for s in sequences if not s.finished]
    clients = {sequence.client for sequence in present}
    if len(clients) < 2:
        marked = [sequence for sequence in present if sequence.beyond_share]
        for sequence in marked:
            sequence.beyond_share = False
        return marked
    slots, tokens = num_slots / len(clients), num_tokens / len(clients)
    by_client: defaultdict[str, list[Sequence]] = defaultdict(list)
    for sequences in (running, waiting):
        for sequence in sorted(sequences, key=lambda s: s.order_of_client):
            if not sequence.finished:
                by_client[sequence.client].append(sequence)
    changed: list[Sequence] = []
    for sequences in by_client.values():
        used = 0
        for count, sequence in enumerate(sequences, 1):
            used += sequence.num_tokens
            beyond = count > 1 and (count > slots or used > tokens)
            if beyond != sequence.beyond_share:
                sequence.beyond_share = beyond
                changed.append(sequence)
    return changed
