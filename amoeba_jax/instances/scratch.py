"""Buffers that outlive an instance as memory alone."""

from collections.abc import Iterable
from typing import NamedTuple

import jax


class Scratch(NamedTuple):
    """Buffers of a group's ranks, of which only the memory outlives an instance: a slot's last token is read after
    something was sampled for it, and hidden states within a step.

    Attributes:
        last_tokens: `[num_slots]` of each rank.
        hidden: `[D, hidden_tokens]` of each rank.
    """

    last_tokens: list[jax.Array]
    hidden: list[jax.Array]

    @classmethod
    def joined(cls, parts: Iterable["Scratch"]) -> "Scratch":
        """Join the buffers of groups side by side."""
        parts = list(parts)
        return cls([t for part in parts for t in part.last_tokens], [h for part in parts for h in part.hidden])

    def split(self, size: int) -> list["Scratch"]:
        """Divide the buffers among groups of `size` ranks."""
        return [
            Scratch(self.last_tokens[first : first + size], self.hidden[first : first + size])
            for first in range(0, len(self.hidden), size)
        ]
