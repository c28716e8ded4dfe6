"""Sizes of a model as one engine stores it."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from amoeba_jax.errors import ConfigError
from amoeba_jax.models.config import ModelConfig
from kvcache.geometry import PageGeometry
from sharding.heads import HeadLayout
from sharding.params import round_up_to_pages

# Rows of a vocabulary shard are a multiple of this number, so that each rank's matrix is aligned.
VOCAB_ALIGNMENT = 16
MOST_FFN_PADDING = 4
"""Limit of stored size over used size for the FFN shards of a model with dense and expert layers."""


class ExpertShards(NamedTuple):
    """Division of the experts of a layer into `max_tp` shards, one for each device at the largest degree.

    Attributes:
        whole: whether a shard has whole experts. False: each shard has a part of the inner features of every expert.
        num_experts: number of experts in a shard.
        size: number of inner features of each expert in a shard, with padding.
    """

    whole: bool
    num_experts: int
    size: int


@dataclass(frozen=True)
class ModelDims:
    """Sizes of a model as one engine stores it: sizes of padded weight shards and of KV cache pages.

    A matrix is divided into `max_tp` shards (`max_tp`: largest tensor-parallel degree). A shard that can become KV
    cache is padded to whole KV pages. FFN shards can become KV cache if `max_tp` is above 1. For attention shards,
    `transform_attention` must also be true. `expert_order` has the experts of each layer in the order in which the
    shards hold them. If `expert_order` is empty, the shards hold the experts in the order of their indices.
    """

    config: ModelConfig
    max_tp: int
    page_size: int
    dtype: str
    transform_attention: bool = False
    expert_order: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def heads(self) -> HeadLayout:
        return HeadLayout.plan(self.config.num_heads, self.config.num_kv_heads, self.max_tp)

    @cached_property
    def pages(self) -> PageGeometry:
        return PageGeometry(self.heads.kv_heads, self.page_size, self.config.head_dim, self.max_tp)

    @property
    def ffn_page_elems(self) -> int | None:
        """Number of elements of a KV page. None: FFN shards cannot become KV cache, and are not padded to pages."""
        return self.pages.page_elems if self.max_tp > 1 else None

    @property
    def attention_page_elems(self) -> int | None:
        """Number of elements of a KV page. None: attention shards cannot become KV cache, and need no padding."""
        return self.pages.page_elems if self.max_tp > 1 and self.transform_attention else None

    @cached_property
    def ffn_shard(self) -> int:
        """Number of inner features of an FFN shard, rounded up so that `gate_up` and `down` fill whole KV pages."""
        share = -(-self.config.ffn_size // self.max_tp)
        if self.ffn_page_elems is None:
            return share
        hidden = self.config.hidden_size
        return round_up_to_pages(share, (2 * hidden, hidden), self.ffn_page_elems)

    @cached_property
    def experts(self) -> ExpertShards:
        """Division of the experts of a layer into shards. Raises `AssertionError` for a model without experts."""
        experts = self.config.experts
        assert experts is not None, "the model has no experts"
        whole = experts.count % self.max_tp == 0
        count = experts.count // self.max_tp if whole else experts.count
        size = experts.ffn_size if whole else -(-experts.ffn_size // self.max_tp)
        if self.ffn_page_elems is not None:
            rows = count * self.config.hidden_size
            size = round_up_to_pages(size, (2 * rows, rows), self.ffn_page_elems)
        return ExpertShards(whole, count, size)

    @property
    def load_shape(self) -> tuple[int, int]:
        """Shape `(layers, experts)` of an array that counts the tokens of each expert. (0, 0) without experts."""
        experts = self.config.experts
        return (0, 0) if experts is None else (self.config.num_layers, experts.count)

    @cached_property
    def ffn_pages(self) -> int:
        """Number of KV pages that a stored `down` shard fills. A `gate_up` shard fills twice as many.

        All layers have the same number. If some layers have experts and others have a dense FFN, the smaller shards are
        padded. If FFN shards never become KV cache, the number is 0.

        Raises `ConfigError` if the shards would need too much padding.
        """
        if self.ffn_page_elems is None:
            return 0
        features = self._features
        used = sum(features[-1] if kind.has_experts else features[0] for kind in self.config.kinds)
        padding = max(features) * self.config.num_layers / used
        if padding > MOST_FFN_PADDING:
            dense, experts = features
            raise ConfigError(
                f"{self.config.family} with dense and expert layers: FFN shards have {dense} features in dense layers "
                f"and {experts} in layers with experts. With equal shards in all layers, the FFNs would take "
                f"{padding:.1f} times their size, the limit is {MOST_FFN_PADDING}: set max_tensor_parallel_size=1"
            )
        return max(features) * self.config.hidden_size // self.ffn_page_elems

    @property
    def _features(self) -> list[int]:
        """Number of inner features of an FFN shard, for each kind of FFN that the model has: dense, then experts."""
        kinds = {kind.has_experts for kind in self.config.kinds}
        dense = [self.ffn_shard] if False in kinds else []
        return [*dense, self.experts.num_experts * self.experts.size] if True in kinds else dense

    @property
    def ffn_intermediates(self) -> int:
        """Largest number of intermediate values that the FFN of any layer computes for one token."""
        dense = 3 * 2 * self.ffn_shard * self.max_tp
        if (experts := self.config.experts) is None:
            return dense
        # Results of all experts of a token, and the features of one expert.
        routed = 2 * experts.top_k * self.config.hidden_size + 3 * 2 * self.experts.size
        return max(routed, dense) if self.config.dense_layers else routed

    @property
    def ffn_copy(self) -> int:
        """Number of elements of the largest temporary copy of FFN weights that XLA makes in a layer. 0 without experts.

        XLA copies the weights of one expert at a time. It also copies all shards of a dense FFN, if they have padding
        (`ffn_pages`).
        """
        if self.config.experts is None:
            return 0
        features = self._features
        padded = self.ffn_page_elems is not None and features[0] < features[-1]
        return 3 * self.config.hidden_size * max(self.experts.size, features[0] * self.max_tp if padded else 0)

    @property
    def vocab_share(self) -> int:
        """Number of vocabulary entries in one shard of the output projection, without padding."""
        return -(-self.config.vocab_size // self.max_tp)

    @property
    def vocab_shard(self) -> int:
        """Number of rows of one shard of the output projection, padded to a multiple of `VOCAB_ALIGNMENT`."""
        if self.max_tp == 1:
            return self.vocab_share
        return -(-self.vocab_share // VOCAB_ALIGNMENT) * VOCAB_ALIGNMENT

    @property
    def kv_shard_heads(self) -> int:
        """Number of KV heads in one shard, including padding and copied heads (see `HeadLayout`)."""
        return self.heads.kv_heads // self.max_tp

    @cached_property
    def qkv_rows(self) -> int:
        """Number of rows of one shard of the query, key and value projection, padded to whole KV pages."""
        used = self.kv_shard_heads * (self.heads.group + 2) * self.config.head_dim
        if self.attention_page_elems is None:
            return used
        return round_up_to_pages(used, (self.config.hidden_size,), self.attention_page_elems)

    @cached_property
    def output_columns(self) -> int:
        """Number of columns of one shard of attention's output projection, padded to whole KV pages."""
        used = self.kv_shard_heads * self.heads.group * self.config.head_dim
        if self.attention_page_elems is None:
            return used
        return round_up_to_pages(used, (self.config.hidden_size,), self.attention_page_elems)
