"""Owners of device buffers in a ledger."""

from enum import StrEnum


class Owner(StrEnum):
    """Owner of a buffer, inside or outside of layers. Reports and metrics show its value."""

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
        """Whether the buffers hold parameters of the model."""
        return self not in (Owner.KV_CACHE, Owner.SAMPLING, Owner.HIDDEN)
