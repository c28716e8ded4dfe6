"""Stored attention heads: the heads of the model, extended so that every tensor-parallel degree divides them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from sharding.errors import LayoutError


@dataclass(frozen=True)
class HeadLayout:
    """Stored heads of one attention layer: the heads of the model, plus copies or zero padding.

    A page of the KV cache holds `kv_heads` KV heads and splits into `max_tp` equal sub-pages, so `kv_heads` must be a
    multiple of `max_tp`. There are three cases for the number of KV heads of the model:

    * A multiple of `max_tp`: all heads are stored once.
    * A divisor of `max_tp` (2 KV heads with `max_tp` 4): each KV head is stored `kv_copies` times. Its query heads are
      distributed over the copies, so that all ranks compute different query heads.
    * Any other number (3 or 6 KV heads with `max_tp` 4): zero heads are added to reach a multiple of `max_tp`.

    Padding query heads have zero weights in the query and the output projection, so they do not change results.

    Attributes:
        model_heads: number of query heads of the model.
        model_kv_heads: number of KV heads of the model.
        max_tp: largest tensor-parallel degree.
        kv_copies: number of stored copies of each KV head.
        kv_heads: number of stored KV heads, a multiple of `max_tp`.
        group: number of stored query heads for each stored KV head.
    """

    model_heads: int
    model_kv_heads: int
    max_tp: int
    kv_copies: int
    kv_heads: int
    group: int

    @classmethod
    def plan(cls, num_heads: int, num_kv_heads: int, max_tp: int) -> "HeadLayout":
        """Choose the stored heads for a model with `num_heads` query heads and `num_kv_heads` KV heads.

        Raises `LayoutError` if `num_heads` is not a multiple of `num_kv_heads`, or `num_kv_heads` is below 1.
        """
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
        """Return, for each stored KV head, the index of its KV head in the model, or -1 for a zero head."""
        stored = np.arange(self.kv_heads) // self.kv_copies
        return np.where(stored < self.model_kv_heads, stored, -1).astype(np.int32)

    def q_rows(self) -> Int32[np.ndarray, " heads"]:
        """Return, for each of the `kv_heads * group` stored query heads, the index of its query head in the model.

        The index is -1 for padding.
        """
        model_group = self.model_heads // self.model_kv_heads
        kv = self.kv_rows()[:, None]
        copy = (np.arange(self.kv_heads) % self.kv_copies)[:, None]
        within = copy * self.group + np.arange(self.group)[None, :]
        valid = (kv >= 0) & (within < model_group)
        return np.where(valid, kv * model_group + within, -1).reshape(-1).astype(np.int32)

    @property
    def kv_padding(self) -> float:
        """Ratio of stored KV heads to KV heads of the model. The KV cache is larger by this factor."""
        return self.kv_heads / self.model_kv_heads
