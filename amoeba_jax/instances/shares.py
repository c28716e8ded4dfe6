"""Fair shares of slots and pages: while several clients have requests, none takes all that the instances hold."""

from collections import defaultdict
from collections.abc import Collection

from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.waiting import Waiting


def mark_beyond_share(running: Collection[Sequence], waiting: Waiting, num_slots: int, num_tokens: int) -> bool:
    """Set `Sequence.beyond_share` of all sequences. Return whether it has changed of any.

    With N clients, a client's share is an N-th of the slots and of the tokens that all instances hold. Its running
    sequences take of that first, then those that wait, each in order; what exceeds it is beyond its share. Its first
    sequence never is, whatever its size, so that a request of any length can end. The share of a client that has no
    requests is everyone's: of one client alone nothing is beyond it.

    The cost grows with what runs, with what is within shares and with what is marked, and only where that is much, as
    when a second client comes, with all that waits.
    """
    of_client: defaultdict[str, list[Sequence]] = defaultdict(list)
    for sequence in sorted(running, key=lambda s: s.order_of_client):
        if not sequence.finished:
            of_client[sequence.client].append(sequence)
    clients = {*of_client, *waiting.clients}
    alone = len(clients) < 2
    slots, tokens = num_slots / max(len(clients), 1), num_tokens / max(len(clients), 1)
    beyond: list[Sequence] = []
    within: list[Sequence] = []
    changed = False
    for client in clients:
        count = used = 0
        for sequence in of_client[client]:
            count, used = count + 1, used + sequence.num_tokens
            exceeds = not alone and count > 1 and (count > slots or used > tokens)
            changed |= exceeds != sequence.beyond_share
            sequence.beyond_share = exceeds
        known = waiting.within_share(client)
        now = set()
        for sequence in waiting.of_client(client) if not alone or len(known) < len(waiting) else ():
            count, used = count + 1, used + sequence.num_tokens
            if not alone and count > 1 and (count > slots or used > tokens):
                break  # and so do all that follow
            now.add(id(sequence))
            if sequence.beyond_share:
                within.append(sequence)
        if not alone:
            beyond += [sequence for number, sequence in known.items() if number not in now]
    waiting.mark(within, False)
    waiting.mark(beyond, True)
    return changed or bool(within or beyond)
