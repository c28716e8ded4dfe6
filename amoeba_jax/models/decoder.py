"""Decoder, divided into segments: the embedding, runs of consecutive layers, and the head.

A segment is one compiled program. The head is the final norm and the output projection.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from amoeba_jax.models.dims import ModelDims
from amoeba_jax.models.experts import MixtureOfExperts
from amoeba_jax.models.kinds import LayerKind
from amoeba_jax.models.layers import (
    Attention,
    FeedForward,
    StepContext,
    hidden_norm,
    matmul,
    norm_scale,
    parameter,
    shards,
)
from kvcache.extents import LayerKV
from sharding.mesh import TP_AXIS
from sharding.owners import Owner
from sharding.params import ParamSpec, Source, deal_rows
from sharding.placement import ModuleKind


class DecoderLayer(nnx.Module):
    """Decoder layer: attention and FFN, each with a norm before it and a residual connection.

    `module` selects attention alone, FFN alone, or both. Some model families also normalize the results of attention
    and FFN (`ModelConfig.post_norms`).
    """

    def __init__(self, dims: ModelDims, layer: int, tp: int, module: ModuleKind = "layer"):
        self.eps, self.offset = dims.config.norm_eps, dims.config.norm_offset
        attends, feeds = module != "ffn", module != "attention"
        post = dims.config.post_norms

        def norm(kind: str, name: str, present: bool) -> nnx.Param | None:
            tensor = f"model.layers.{layer}.{name}_layernorm.weight"
            return norm_scale(dims, kind, tensor, dims.config.hidden_size, Owner.NORM, layer) if present else None

        self.attention_norm = norm("attention_norm", "input", attends)
        self.attention_post_norm = norm("attention_post_norm", "post_attention", attends and post)
        self.mlp_norm = norm("mlp_norm", "pre_feedforward" if post else "post_attention", feeds)
        self.mlp_post_norm = norm("mlp_post_norm", "post_feedforward", feeds and post)
        self.attention = Attention(dims, layer, tp) if attends else None
        ffn = MixtureOfExperts if dims.config.kinds[layer].has_experts else FeedForward
        self.mlp = ffn(dims, layer, tp) if feeds else None

    def __call__(
        self, x: Float[Array, "D N"], extents: LayerKV, context: StepContext | None
    ) -> tuple[Float[Array, "D N"], LayerKV, Int32[Array, "k N"] | None]:
        """Return `(x, extents, experts)`: hidden states, KV buffers with the new tokens, and expert ids of each token.

        If the layer has no experts, `experts` is None. If the layer has attention, `context` must be given.
        """
        chosen = None
        if self.attention is not None:
            assert context is not None, "attention needs the step's tables"
            attended, extents = self.attention(self._normed(x, self.attention_norm), extents, context)
            x = x + self._normed(attended, self.attention_post_norm)
        if self.mlp is not None:
            normed = self._normed(x, self.mlp_norm)
            if isinstance(self.mlp, MixtureOfExperts):
                result, chosen = self.mlp(normed, context)
            else:
                result = self.mlp(normed)
            x = x + self._normed(result, self.mlp_post_norm)
        return x, extents, chosen

    def _normed(self, x: Float[Array, "D N"], scale: nnx.Param | None) -> Float[Array, "D N"]:
        return x if scale is None else hidden_norm(x, scale[...], self.eps, self.offset)


class Embedding(nnx.Module):
    """Token embedding. Every rank (device of the instance) has the whole table, because every rank looks up all tokens.

    If the table is not tied to the output projection, it is one array `[vocabulary, D]`. If it is tied, it consists of
    all shards of the output projection, each `[vocabulary shard, D]`.
    """

    def __init__(self, dims: ModelDims):
        self.tied, self.scale = dims.config.tied_embeddings, dims.config.embedding_scale
        self.share = dims.vocab_share
        if self.tied:
            spec = head_spec(dims)
            self.table = nnx.List(
                [nnx.Param(spec.abstract(dims.dtype), spec=spec, shard=c, whole=True) for c in range(dims.max_tp)]
            )
        else:
            shape = (dims.config.vocab_size, dims.config.hidden_size)
            spec = ParamSpec("embedding", (Source("model.embed_tokens.weight", shape),), shape, owner=Owner.EMBEDDING)
            self.table = nnx.List([parameter(dims, spec)])

    def __call__(self, tokens: Int32[Array, " N"]) -> Float[Array, "D N"]:
        rows = self._rows(tokens)
        return (rows if self.scale == 1.0 else rows * jnp.asarray(self.scale, rows.dtype)).T

    def _rows(self, tokens: Int32[Array, " N"]) -> Float[Array, "N D"]:
        if not self.tied:
            return self.table[0][...][tokens]
        rows = jnp.zeros((), self.table[0].dtype)
        for index, shard in enumerate(self.table):
            local = tokens - index * self.share
            inside = (local >= 0) & (local < self.share)
            rows = rows + jnp.where(inside[:, None], shard[...][jnp.where(inside, local, 0)], 0)
        return rows


def head_spec(dims: ModelDims) -> ParamSpec:
    """Return the spec of the output projection, with shards `[vocabulary shard, D]`.

    If the model ties the output projection to the embedding, the shards come from the checkpoint tensor of the
    embedding.
    """
    config = dims.config
    name = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    rows = deal_rows(config.vocab_size, dims.max_tp, dims.vocab_shard)
    source = Source(name, (config.vocab_size, config.hidden_size), rows)
    shape = (dims.vocab_shard, config.hidden_size)
    return ParamSpec("head", (source,), shape, dims.max_tp, "sharded", owner=Owner.HEAD)


class Head(nnx.Module):
    """Final norm and output projection. Each rank computes a part of the logits. An all-gather joins the parts."""

    def __init__(self, dims: ModelDims, tp: int):
        self.dims, self.tp = dims, tp
        hidden = dims.config.hidden_size
        self.norm = norm_scale(dims, "final_norm", "model.norm.weight", hidden, Owner.FINAL_NORM)
        self.kernels = shards(dims, head_spec(dims), tp)

    def __call__(self, x: Float[Array, "D R"]) -> Float[Array, "V R"]:
        """Return f32 logits over the vocabulary without padding, the same on every rank."""
        config = self.dims.config
        x = hidden_norm(x, self.norm[...], config.norm_eps, config.norm_offset)
        local = [matmul(kernel[...], x) for kernel in self.kernels]
        logits = local[0] if len(local) == 1 else jnp.concatenate(local)
        if self.tp > 1:
            logits = lax.all_gather(logits, TP_AXIS, tiled=True)
        logits = self._drop_padding(logits)
        cap = config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _drop_padding(self, logits: Float[Array, "padded R"]) -> Float[Array, "V R"]:
        vocabulary, shard, share = self.dims.config.vocab_size, self.dims.vocab_shard, self.dims.vocab_share
        if share != shard:
            blocks = logits.reshape(self.dims.max_tp, shard, -1)[:, :share]
            logits = blocks.reshape(self.dims.max_tp * share, -1)
        return logits[:vocabulary]


@dataclass(frozen=True)
class SegmentPlan:
    """Part of a model that one program computes: consecutive layers, the embedding, or the head.

    If `embeds` is True, a program of layers can also compute the embedding. It does so only at the beginning of a step.
    For example, three segments of 10 equal layers share one program, and only the first segment computes the embedding.

    Attributes:
        start: first layer. For the head, the number of layers.
        kinds: kind of each layer. Empty for the embedding and the head.
        module: computed part of each layer: `attention`, `ffn`, or `layer` for both. `embedding` and `head` are
            segments without layers.
        embeds: whether the program includes the embedding, so that it can begin a step.
    """

    start: int
    kinds: tuple[LayerKind, ...]
    module: Literal["layer", "attention", "ffn", "embedding", "head"] = "layer"
    embeds: bool = True

    @property
    def layers(self) -> range:
        return range(self.start, self.start + len(self.kinds))

    @property
    def is_head(self) -> bool:
        return self.module == "head"

    @property
    def has_experts(self) -> bool:
        """Whether the program computes experts. It then also counts the tokens of each expert."""
        return self.module in ("layer", "ffn") and any(kind.has_experts for kind in self.kinds)

    @property
    def takes_batch(self) -> bool:
        """Whether the program takes `StepBatch.packed`. A program of dense FFNs does not take it."""
        return self.module != "ffn" or self.has_experts


class Segment(nnx.Module):
    """Flax modules of one segment at tensor-parallel degree `tp`. Parameters have shapes and dtypes, but no data."""

    def __init__(self, dims: ModelDims, plan: SegmentPlan, tp: int):
        self.embedding = Embedding(dims) if plan.embeds else None
        kind: ModuleKind = plan.module if plan.module in ("attention", "ffn") else "layer"
        self.layers = nnx.List([DecoderLayer(dims, layer, tp, kind) for layer in plan.layers])
        self.head = Head(dims, tp) if plan.is_head else None


def leaf_variables(segment: Segment) -> list[nnx.Variable]:
    """Return the parameters of a segment, in the order in which the compiled segment expects its weights."""
    state = nnx.split(segment)[1]
    return jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def is_sharded(variable: nnx.Variable) -> bool:
    """Return whether the ranks use different shards of this parameter. False: all ranks use the same shard."""
    metadata = variable.get_metadata()
    spec: ParamSpec = metadata["spec"]
    return spec.placement == "sharded" and not metadata.get("whole", False)


def plan_segments(dims: ModelDims, segment_layers: int) -> tuple[SegmentPlan, ...]:
    """Divide the layers of a model into segments of at most `segment_layers` layers, of equal length if possible.

    Segments with equal kinds of layers share one executable, so short segments compile faster. For example, on CPU, 30
    layers in segments of 8 layers compile twice as fast as in one segment. The short segments make a decode step at
    most 2% longer.
    """
    kinds = dims.config.kinds
    count = len(kinds)
    # A length that divides the number of layers avoids a second executable for the rest.
    longest = min(segment_layers, count)
    lengths = range(longest, longest // 2, -1)
    length = next((length for length in lengths if count % length == 0), longest)
    return tuple(SegmentPlan(start, kinds[start : start + length]) for start in range(0, count, length))


def module_plan(dims: ModelDims, layers: range, module: ModuleKind, *, embeds: bool) -> SegmentPlan:
    """Return the segment that computes the attention, the FFN or both (`module`) of consecutive layers.

    `embeds` says whether the segment also includes the embedding. It has no effect on a segment of FFNs, because a step
    never begins with an FFN.
    """
    kinds = dims.config.kinds[layers.start : layers.stop]
    return SegmentPlan(layers.start, kinds, module, embeds and module != "ffn")


def embedding_plan() -> SegmentPlan:
    """Return the segment with the embedding alone.

    The segment is used if the first layers are on devices without the embedding.
    """
    return SegmentPlan(0, (), "embedding")


def head_plan(dims: ModelDims) -> SegmentPlan:
    """Return the segment of the head: final norm and logits."""
    return SegmentPlan(dims.config.num_layers, (), "head", embeds=False)


def model_specs(dims: ModelDims) -> dict[str, ParamSpec]:
    """Return all parameters of the model by name."""
    specs: dict[str, ParamSpec] = {}
    for plan in (SegmentPlan(0, dims.config.kinds), head_plan(dims)):
        for _, variable in nnx.to_flat_state(nnx.split(Segment(dims, plan, tp=1))[1]):
            spec: ParamSpec = variable.get_metadata()["spec"]
            specs.setdefault(spec.name, spec)
    return specs


def num_parameters(dims: ModelDims) -> int:
    """Return the number of parameters of the model. Padding and copies do not count."""
    return sum(spec.model_elements for spec in model_specs(dims).values())
