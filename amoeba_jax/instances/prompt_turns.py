"""Whose prompts an instance computes next."""

from collections.abc import Collection, Iterable

from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import Row

# Clients without prompts, of whom it is known that they have had more than others. Their number has a limit: a prompt
# may wait for long behind those of a higher rank, while any number of clients come and go.
_MOST_ABSENT = 256


class PromptTurns:
    """The order of prompts, fair to clients: of those with prompts of the same rank, the one for whom the fewest tokens
    were computed goes first.

    What counts is the time in which they have prompts: who comes back is taken to have had as much as those who were
    there, and no more. (The virtual token counters of Sheng et al., "Fairness in Serving Large Language Models", 2024,
    for prompts alone: what decodes has a row in every step.)
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._present: frozenset[str] = frozenset()

    def ordered(self, prompts: Collection[Sequence]) -> list[Sequence]:
        """Those whose turn it is first; those of one client and rank as they came. Where clients are even, the shorter
        of their first prompts goes first."""
        if not prompts:
            self._tokens, self._present = {}, frozenset()  # no one has waited for another
            return []
        lengths: dict[str, int] = {}
        for sequence in sorted(prompts, key=lambda s: s.order):
            lengths.setdefault(sequence.client, sequence.num_uncomputed_tokens)
        stayed = [self._tokens[client] for client in lengths if client in self._present]
        known = [self._tokens[client] for client in lengths if client in self._tokens]
        least = min(stayed or known, default=0)
        absent = [(client, n) for client, n in self._tokens.items() if client not in lengths and n > least]
        present = {client: max(self._tokens.get(client, least), least) for client in lengths}
        self._tokens, self._present = dict(absent[-_MOST_ABSENT:]) | present, frozenset(lengths)
        return sorted(prompts, key=lambda s: (s.rank, self._tokens[s.client], lengths[s.client], s.order))

    def took(self, rows: Iterable[Row]) -> None:
        """Count the prompts of a step that was launched."""
        for row in rows:
            if row.length > 1:
                client = row.sequence.client
                self._tokens[client] = self._tokens.get(client, 0) + row.length
