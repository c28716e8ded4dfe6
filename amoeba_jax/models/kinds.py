"""Kinds of layers. Layers of the same kind have weights of equal shapes, and share programs."""

from dataclasses import dataclass
from typing import NamedTuple


class LayerKind(NamedTuple):
    """Kind of a layer.

    Attributes:
        window: sliding window of attention in tokens. None: full attention.
        local_rope: whether the rotary embedding is `ModelConfig.local_rope`, not `ModelConfig.rope`.
        has_experts: whether the FFN is a mixture of experts, not a dense FFN.
    """

    window: int | None = None
    local_rope: bool = False
    has_experts: bool = False

    def __str__(self) -> str:
        window = "" if self.window is None else f" of {self.window} tokens"
        return f"{'experts' if self.has_experts else 'dense'}, attention{window}"


@dataclass(frozen=True)
class ExpertConfig:
    """Mixture of experts of a layer.

    Attributes:
        count: number of experts.
        top_k: number of experts that compute each token.
        ffn_size: number of inner features of an expert.
        normalized: whether the weights of a token's experts are scaled so that their sum is 1. False: each weight is
            the softmax over all experts.
        biased: whether the router and both projections of each expert have a bias.
        shared_ffn_size: number of inner features of the shared expert, which computes every token. 0: no shared expert.
    """

    count: int
    top_k: int
    ffn_size: int
    normalized: bool
    biased: bool = False
    shared_ffn_size: int = 0
