"""What buffers of a device hold: the names under which a ledger books them."""

from enum import StrEnum


class Owner(StrEnum):
    """Owner of a buffer's bytes, within a layer or outside the layers. Values are what reports and metrics show."""

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
        """Whether it owns parameters of the model."""
        return self not in (Owner.KV_CACHE, Owner.SAMPLING, Owner.HIDDEN)
