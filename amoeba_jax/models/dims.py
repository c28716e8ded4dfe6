"""Sizes of a model as one engine stores it."""

from dataclasses import dataclass
from functools import cached_property

from amoeba_jax.models.config import ModelConfig
from kvcache.geometry import PageGeometry
from sharding.heads import HeadLayout
from sharding.params import round_up_to_pages

# Rows of a vocabulary shard are a multiple of this number, so that each rank's matrix is aligned.
VOCAB_ALIGNMENT = 16


@dataclass(frozen=True)
class ModelDims:
    """Sizes of a model as one engine stores it: padded weight shards and page geometry.

    The sizes follow from the model's config and the other fields, which are settings of `EngineConfig`. A matrix is
    divided into `max_tp` shards. A shard that can become KV cache is padded to whole KV pages.
    """

    config: ModelConfig
    max_tp: int
    page_size: int
    dtype: str
    transform_attention: bool = False

    @cached_property
    def heads(self) -> HeadLayout:
        return HeadLayout.plan(self.config.num_heads, self.config.num_kv_heads, self.max_tp)

    @cached_property
    def pages(self) -> PageGeometry:
        return PageGeometry(self.heads.kv_heads, self.page_size, self.config.head_dim, self.max_tp)

    @property
    def ffn_page_elems(self) -> int | None:
        """Elements of the KV pages to which FFN shards are padded. None if FFN shards never become KV cache."""
        return self.pages.page_elems if self.max_tp > 1 else None

    @property
    def attention_page_elems(self) -> int | None:
        """Elements of the KV pages to which attention shards are padded. None if these never become KV cache."""
        return self.pages.page_elems if self.max_tp > 1 and self.transform_attention else None

    @cached_property
    def ffn_shard(self) -> int:
        """Inner features of an FFN shard, rounded up so that `gate_up` and `down` shards are whole pages."""
        share = -(-self.config.ffn_size // self.max_tp)
        if self.ffn_page_elems is None:
            return share
        hidden = self.config.hidden_size
        return round_up_to_pages(share, (2 * hidden, hidden), self.ffn_page_elems)

    @property
    def vocab_share(self) -> int:
        """Vocabulary entries of a shard of the head, without padding."""
        return -(-self.config.vocab_size // self.max_tp)

    @property
    def vocab_shard(self) -> int:
        """Rows of a shard of the head, with padding to a multiple of `VOCAB_ALIGNMENT`."""
        if self.max_tp == 1:
            return self.vocab_share
        return -(-self.vocab_share // VOCAB_ALIGNMENT) * VOCAB_ALIGNMENT

    @property
    def kv_shard_heads(self) -> int:
        """KV heads of a shard, with padding and copies (see `HeadLayout`)."""
        return self.heads.kv_heads // self.max_tp

    @cached_property
    def qkv_rows(self) -> int:
        """Rows of a shard of the query, key and value projection, with padding to whole pages."""
        used = self.kv_shard_heads * (self.heads.group + 2) * self.config.head_dim
        if self.attention_page_elems is None:
            return used
        return round_up_to_pages(used, (self.config.hidden_size,), self.attention_page_elems)

    @cached_property
    def output_columns(self) -> int:
        """Columns of a shard of the output projection, with padding to whole pages."""
        used = self.kv_shard_heads * self.heads.group * self.config.head_dim
        if self.attention_page_elems is None:
            return used
        return round_up_to_pages(used, (self.config.hidden_size,), self.attention_page_elems)
