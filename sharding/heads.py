"""How attention heads are laid out so that every tensor-parallel degree up to `max_tp` divides them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from sharding.errors import LayoutError


@dataclass(frozen=True)
class HeadLayout:
    """Stored heads of one attention layer: the model's own, plus replicas or zero padding.

    A page holds `kv_heads` KV heads and splits into `max_tp` equal pieces, so `kv_heads` must divide by
    `max_tp`. Models whose own count does not are laid out in one of two ways:

    * fewer KV heads than ranks, and the ranks divide by them (2 KV heads at TP4): each KV head is stored
      `kv_copies` times and its query heads are dealt out to the copies, so that all ranks do useful work;
    * otherwise (3 or 6 KV heads at TP4) zero heads fill up to the next multiple of `max_tp`.

    `group` is the number of stored query heads per stored KV head. Padded query heads have zero weights in
    both the query and the output projection: they change no result.
    """

    model_heads: int
    model_kv_heads: int
    max_tp: int
    kv_copies: int
    kv_heads: int
    group: int

    @classmethod
    def plan(cls, num_heads: int, num_kv_heads: int, max_tp: int) -> "HeadLayout":
        """Choose the layout. Raises `LayoutError` if query heads are not a multiple of KV heads."""
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise LayoutError(
                f"{num_heads} query heads cannot be grouped over {num_kv_heads} KV heads: "
                "the number of query heads must be a multiple of the number of KV heads"
            )
        group = num_heads // num_kv_heads
        if max_tp % num_kv_heads == 0:
            copies = max_tp // num_kv_heads
            return cls(num_heads, num_kv_heads, max_tp, copies, max_tp, -(-group // copies))
        kv_heads = -(-num_kv_heads // max_tp) * max_tp
        return cls(num_heads, num_kv_heads, max_tp, 1, kv_heads, group)

    def kv_rows(self) -> Int32[np.ndarray, " kv_heads"]:
        """Index of the model's KV head behind each stored one; -1 is a zero head."""
        stored = np.arange(self.kv_heads) // self.kv_copies
        return np.where(stored < self.model_kv_heads, stored, -1).astype(np.int32)

    def q_rows(self) -> Int32[np.ndarray, " heads"]:
        """Index of the model's query head behind each of the `kv_heads * group` stored ones; -1 is a zero head."""
        model_group = self.model_heads // self.model_kv_heads
        kv = self.kv_rows()[:, None]
        copy = (np.arange(self.kv_heads) % self.kv_copies)[:, None]
        within = copy * self.group + np.arange(self.group)[None, :]
        valid = (kv >= 0) & (within < model_group)
        return np.where(valid, kv * model_group + within, -1).reshape(-1).astype(np.int32)

    @property
    def kv_padding(self) -> float:
        """Stored over model KV heads: how much larger the KV cache is than the model alone would need."""
        return self.kv_heads / self.model_kv_heads
