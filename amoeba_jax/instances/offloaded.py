"""KV pages of a sequence in host memory."""

from dataclasses import dataclass

import jax
import numpy as np


@dataclass
class HostPages:
    """Pages of a sequence, in a form that does not depend on the degree of its instance.

    Attributes:
        num_computed: leading tokens whose keys and values the pages hold.
        layers: contents of the pages of each layer: blocks `[tp * pages, page_elems / tp]` in pinned host memory where
            the device has it, each with its number of pages in use.
    """

    num_computed: int
    layers: list[list[tuple[jax.Array, int]]]

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for layer in self.layers for block, _ in layer)

    def whole(self, layer: int, tp: int) -> np.ndarray:
        """Return the pages of a layer for homes of `tp` devices, `[pages, tp, page_elems / tp]`."""
        found = []
        for block, used in self.layers[layer]:
            ranks = len(block.sharding.device_set)
            pages = np.asarray(block).reshape(ranks, len(block) // ranks, -1).transpose(1, 0, 2)
            found.append(pages.reshape(len(pages), -1)[:used])
        pages = np.concatenate(found)
        return pages.reshape(len(pages), tp, -1)
