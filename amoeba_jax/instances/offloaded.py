"""KV pages of a sequence in host memory."""

from dataclasses import dataclass

import jax
import numpy as np


@dataclass
class HostPages:
    """Pages of a sequence in host memory. Their form does not depend on the degree of the instance.

    Attributes:
        num_computed: number of leading tokens whose keys and values are in the pages.
        layers: contents of the pages, by layer. A layer has blocks `[tp * pages, page_elems / tp]`, each with its
            number of used pages. The blocks are in pinned host memory if the device supports it.
    """

    num_computed: int
    layers: list[list[tuple[jax.Array, int]]]

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for layer in self.layers for block, _ in layer)

    def whole(self, layer: int, tp: int) -> np.ndarray:
        """Return the pages of a layer in the form for homes of `tp` devices: `[pages, tp, page_elems / tp]`."""
        found = []
        for block, used in self.layers[layer]:
            ranks = len(block.sharding.device_set)
            pages = np.asarray(block).reshape(ranks, len(block) // ranks, -1).transpose(1, 0, 2)
            found.append(pages.reshape(len(pages), -1)[:used])
        pages = np.concatenate(found)
        return pages.reshape(len(pages), tp, -1)
