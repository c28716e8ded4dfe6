"""Owners of device buffers in a memory ledger. An owner is the use of a buffer, such as KV cache."""

from enum import StrEnum


class Owner(StrEnum):
    """Use of a device buffer, such as KV cache or FFN weights. Reports and metrics show the value of the member."""

    KV_CACHE = "kv cache"
    FFN = "ffn weights"
    ATTENTION = "attention weights"
    NORM = "norm weights"
    EMBEDDING = "embedding"
    FINAL_NORM = "final_norm"
    HEAD = "head"
    SAMPLING = "sampling"
    HIDDEN = "hidden states"

    @property
    def is_weights(self) -> bool:
        """Whether buffers of this owner hold parameters of the model."""
        return self not in (Owner.KV_CACHE, Owner.SAMPLING, Owner.HIDDEN)
