"""Order in which an instance computes prompts. It is fair to clients."""

from collections.abc import Collection, Iterable

from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step import Row

# Counters of clients without prompts are kept for this many clients. A prompt may wait long behind prompts of a higher
# rank, while any number of clients come and go.
_MAX_ABSENT = 256


class PromptTurns:
    """Order of prompts. Among prompts of one priority, the client with the fewest computed prompt tokens comes first.

    A client that returns after an absence gets the smallest counter of the present clients, so it gains nothing by the
    absence.

    This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", 2024, for prompts
    only. Decodes need no counter, because every decoding sequence has a row in each step.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._present: frozenset[str] = frozenset()

    def ordered(self, prompts: Collection[Sequence]) -> list[Sequence]:
        """Return the prompts in the order in which to compute them.

        Prompts of one client and priority keep their order of arrival. If two clients have equal counters, the client
        with the shorter first prompt comes first.
        """
        if not prompts:
            self._tokens, self._present = {}, frozenset()  # no client waits for another
            return []
        lengths: dict[str, int] = {}
        for sequence in sorted(prompts, key=lambda s: s.order):
            lengths.setdefault(sequence.client, sequence.num_uncomputed_tokens)
        stayed = [self._tokens[client] for client in lengths if client in self._present]
        known = [self._tokens[client] for client in lengths if client in self._tokens]
        least = min(stayed or known, default=0)
        absent = [(client, n) for client, n in self._tokens.items() if client not in lengths and n > least]
        present = {client: max(self._tokens.get(client, least), least) for client in lengths}
        self._tokens, self._present = dict(absent[-_MAX_ABSENT:]) | present, frozenset(lengths)
        return sorted(prompts, key=lambda s: (s.rank, self._tokens[s.client], lengths[s.client], s.order))

    def took(self, rows: Iterable[Row]) -> None:
        """Add the prompt tokens of a launched step to the counters of their clients."""
        for row in rows:
            if row.length > 1:
                client = row.sequence.client
                self._tokens[client] = self._tokens.get(client, 0) + row.length
