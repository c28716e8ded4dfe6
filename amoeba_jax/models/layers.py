"""Building blocks of the decoder. They run inside `shard_map`: shapes are of one rank, and collectives are explicit."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from amoeba_jax.models.dims import ModelDims
from kvcache.extents import LayerKV, extent_starts
from pallas_kernels.kv_append import append_kv
from pallas_kernels.paged_attention import PageTable, paged_attention
from sharding.mesh import TP_AXIS
from sharding.owners import Owner
from sharding.params import ParamSpec, Source, deal_rows, expand_rows


class QueryGroup(NamedTuple):
    """Sequences with equally many tokens in a step: `B` sequences of `T` tokens.

    Attributes:
        query_positions: `[B, T]` position of each token in its sequence. -1 for padding.
        tables: page ids of the sequences, one table for each KV buffer (extent) of the layer (`kvcache.page_lists`).
    """

    query_positions: Int32[Array, "B T"]
    tables: tuple[PageTable, ...]


class StepContext(NamedTuple):
    """Inputs of every layer in a step, in addition to weights, cache and hidden states.

    The `N` tokens of a step are ordered by group. Hidden states are feature-major, `[D, N]`: see `matmul`.

    Attributes:
        rotary: pairs of cosines and sines, `[N, h/2]` each. The first pair is for `ModelConfig.rope`. The second pair,
            if any, is for `ModelConfig.local_rope`.
        page_ids: id of the KV page that gets the key and value of each token, `[N]`. -1 for padding. If the layer has
            several KV buffers (extents), ids continue from one buffer to the next (`kvcache.extents`).
        page_offsets: index of each token in its page, `[N]`.
        groups: query groups of the step.
    """

    rotary: tuple[tuple[Float[Array, "N half"], Float[Array, "N half"]], ...]
    page_ids: Int32[Array, " N"]
    page_offsets: Int32[Array, " N"]
    groups: tuple[QueryGroup, ...]


def parameter(dims: ModelDims, spec: ParamSpec) -> nnx.Param:
    """Return a parameter without data, with the shape and dtype of one shard of `spec`.

    The metadata of the parameter includes `spec`.
    """
    return nnx.Param(spec.abstract(dims.dtype), spec=spec, shard=0)


def norm_scale(dims: ModelDims, kind: str, tensor: str, size: int, owner: Owner, layer: int | None = None) -> nnx.Param:
    """Return the scale vector of an RMS norm, as a parameter without data. Every rank uses the whole vector."""
    init = "zeros" if dims.config.norm_offset else "ones"
    return parameter(dims, ParamSpec(kind, (Source(tensor, (size,)),), (size,), init=init, owner=owner, layer=layer))


def shards(dims: ModelDims, spec: ParamSpec, tp: int) -> nnx.List:
    """Return one parameter (see `parameter`) for each shard that a rank uses at tensor-parallel degree `tp`."""
    abstract = spec.abstract(dims.dtype)
    return nnx.List([nnx.Param(abstract, spec=spec, shard=index) for index in range(spec.local_shards(tp))])


def matmul(kernel: Float[Array, "O I"], x: Float[Array, "I N"]) -> Float[Array, "O N"]:
    """Return `kernel @ x` in f32, with full f32 precision for f32 inputs.

    XLA on CPU first packs the right operand of a product. Here the right operand is `x`, which is small. In `x @ W`, it
    would be the large weights. For 32 tokens, all products of a 125M model take 49 ms in this form and 75 ms as `x @ W`
    (2 cores, f32).
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(kernel, x, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def rank_sum(x: jax.Array, tp: int) -> jax.Array:
    """Return the sum of `x` over the `tp` ranks."""
    return lax.psum(x, TP_AXIS) if tp > 1 else x


def rms_norm(
    x: Float[Array, "... h"], scale: Float[Array, " h"], eps: float, offset: float | None = None
) -> Float[Array, "... h"]:
    """Normalize the last axis by its root mean square, and multiply by `scale`. Computes in f32, returns `x.dtype`.

    If `offset` is a number, add it to the scale, and round only the product to `x.dtype` (Gemma, gpt-oss). If `offset`
    is None, round the normalized values before the multiplication (Llama).
    """
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if offset is not None:
        return (wide * (scale.astype(jnp.float32) + offset)).astype(x.dtype)
    return (scale * wide.astype(x.dtype)).astype(x.dtype)


def hidden_norm(
    x: Float[Array, "D N"], scale: Float[Array, " D"], eps: float, offset: float | None = None
) -> Float[Array, "D N"]:
    """Apply `rms_norm` to the hidden state of each token, along the first axis."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=0, keepdims=True) + eps)
    if offset is not None:
        return (wide * (scale.astype(jnp.float32)[:, None] + offset)).astype(x.dtype)
    return (scale[:, None] * wide.astype(x.dtype)).astype(x.dtype)


def rotate(x: Float[Array, "N H h"], cos: Float[Array, "N half"], sin: Float[Array, "N half"]) -> jax.Array:
    """Apply the rotary embedding to pairs `(i, i + h/2)`, the convention of Hugging Face's Llama."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention over the paged KV cache. Heads are split over the ranks."""

    def __init__(self, dims: ModelDims, layer: int, tp: int):
        kind = dims.config.kinds[layer]
        self.dims, self.tp, self.window, self.rope = dims, tp, kind.window, int(kind.local_rope)
        config, heads, max_tp = dims.config, dims.heads, dims.max_tp
        hf = f"model.layers.{layer}.self_attn"
        hidden, head_dim = config.hidden_size, config.head_dim
        q_rows = expand_rows(heads.q_rows().reshape(max_tp, -1), head_dim)
        kv_rows = expand_rows(heads.kv_rows().reshape(max_tp, -1), head_dim)
        sizes = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        owned = {"owner": Owner.ATTENTION, "layer": layer}
        sharded = {"num_shards": max_tp, "placement": "sharded", "page_elems": dims.attention_page_elems, **owned}

        def sources(kind: str) -> tuple[Source, ...]:
            shape = (hidden,) if kind == "weight" else ()
            return tuple(
                Source(f"{hf}.{p}_proj.{kind}", (sizes[p] * head_dim, *shape), rows[p]) for p in ("q", "k", "v")
            )

        self.qkv = shards(
            dims,
            ParamSpec("attention.qkv", sources("weight"), (dims.qkv_rows, hidden), **sharded),
            tp,
        )
        o_source = Source(f"{hf}.o_proj.weight", (hidden, config.num_heads * head_dim), q_rows, axis=1)
        self.o = shards(
            dims,
            ParamSpec("attention.o", (o_source,), (hidden, dims.output_columns), **sharded),
            tp,
        )
        used = q_rows.shape[1] + 2 * kv_rows.shape[1]
        bias_spec = ParamSpec("attention.qkv_bias", sources("bias"), (used,), max_tp, "sharded", **owned)
        o_bias_spec = ParamSpec("attention.o_bias", (Source(f"{hf}.o_proj.bias", (hidden,)),), (hidden,), **owned)
        self.qkv_bias = shards(dims, bias_spec, tp) if config.qkv_bias else None
        self.o_bias = parameter(dims, o_bias_spec) if config.output_bias else None
        sink_rows = heads.q_rows().reshape(max_tp, -1)
        sink_source = Source(f"{hf}.sinks", (config.num_heads,), sink_rows)
        sink_spec = ParamSpec("attention.sinks", (sink_source,), sink_rows.shape[1:], max_tp, "sharded", **owned)
        self.sinks = shards(dims, sink_spec, tp) if config.sinks else None
        norms = ("q_norm", "k_norm") if config.qk_norm else ()
        scales = [norm_scale(dims, f"attention.{n}", f"{hf}.{n}.weight", head_dim, **owned) for n in norms]
        self.q_norm, self.k_norm = scales if scales else (None, None)

    def __call__(
        self, x: Float[Array, "D N"], extents: LayerKV, context: StepContext
    ) -> tuple[Float[Array, "D N"], LayerKV]:
        """Return the attention output, summed over the ranks, and the layer's KV buffers with the new tokens."""
        config, geometry, tp = self.dims.config, self.dims.pages, self.tp
        q, k, v = self._project(x)
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm[...], config.norm_eps, config.norm_offset)
            k = rms_norm(k, self.k_norm[...], config.norm_eps, config.norm_offset)
        cos, sin = context.rotary[self.rope]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        pages = [extent.reshape(-1, *geometry.sub_page_shape(tp)) for extent in extents]
        starts = extent_starts(page.shape[0] for page in pages)
        pages = append_kv(pages, starts, k, v, context.page_ids, context.page_offsets)
        sinks = None if self.sinks is None else jnp.concatenate([sink[...] for sink in self.sinks])
        outputs, first = [], 0
        for group in context.groups:
            batch, length = group.query_positions.shape
            queries = q[first : first + batch * length].reshape(batch, length, *q.shape[1:])
            out = paged_attention(
                queries,
                pages,
                group.tables,
                group.query_positions,
                scale=config.attention_scale or config.head_dim**-0.5,
                sliding_window=self.window,
                soft_cap=config.attention_soft_cap,
                sinks=sinks,
            )
            outputs.append(out.reshape(batch * length, *q.shape[1:]))
            first += batch * length
        out = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)
        result = self._output(out.reshape(out.shape[0], len(self.o), -1))
        return result, [page.reshape(extent.shape) for page, extent in zip(pages, extents, strict=True)]

    def _project(self, x: Float[Array, "D N"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries `[N, H, h]`, keys and values `[N, K, h]` of this rank."""
        dims = self.dims
        head_dim, kv_heads = dims.config.head_dim, dims.kv_shard_heads
        split = [kv_heads * dims.heads.group, kv_heads * (dims.heads.group + 1)]
        used = kv_heads * (dims.heads.group + 2) * head_dim
        parts = []
        for index, kernel in enumerate(self.qkv):
            # Without the barrier, XLA computes `x.T @ W.T`, which is slower (see `matmul`) and not supported in
            # bfloat16 on CPU.
            y = lax.optimization_barrier(matmul(kernel[...], x))[:used].T
            if self.qkv_bias is not None:
                y = y + self.qkv_bias[index][...]
            y = y.astype(x.dtype).reshape(x.shape[1], -1, head_dim)
            parts.append(jnp.split(y, split, axis=1))
        if len(parts) == 1:
            q, k, v = parts[0]
            return q, k, v
        q, k, v = (jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True))
        return q, k, v

    def _output(self, heads: Float[Array, "N shards columns"]) -> Float[Array, "D N"]:
        padding = self.dims.output_columns - heads.shape[-1]
        if padding:
            heads = jnp.pad(heads, ((0, 0), (0, 0), (0, padding)))
        total = sum(matmul(kernel[...], heads[:, index].T) for index, kernel in enumerate(self.o))
        total = rank_sum(jnp.asarray(total), self.tp)
        if self.o_bias is not None:
            total = total + self.o_bias[...][:, None]
        return total.astype(heads.dtype)


def _silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return nnx.silu(gate) * up


def _gelu_tanh(gate: jax.Array, up: jax.Array) -> jax.Array:
    return nnx.gelu(gate, approximate=True) * up


def _clamped_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * nnx.sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "clamped_silu": _clamped_silu,
}
"""Functions of gate and up features by `ModelConfig.activation`. They return 0 for zeros, which pad the features."""


class FeedForward(nnx.Module):
    """Gated feed-forward network. Each shard has a part of the inner features. The results of the shards are added."""

    def __init__(self, dims: ModelDims, layer: int, tp: int, shared_size: int = 0):
        self.tp, self.activation = tp, dims.config.activation
        size = shared_size or dims.config.ffn_size
        shard = -(-size // dims.max_tp) if shared_size else dims.ffn_shard
        kind, hf = ("shared_expert", "mlp.shared_expert") if shared_size else ("mlp", "mlp")
        hf = f"model.layers.{layer}.{hf}"
        rows = deal_rows(size, dims.max_tp, shard)
        hidden = dims.config.hidden_size
        shape = (size, hidden)
        common = {
            "num_shards": dims.max_tp,
            "placement": "sharded",
            "page_elems": None if shared_size else dims.ffn_page_elems,
            "strided": True,
            "owner": Owner.FFN,
            "layer": layer,
        }
        pages = 0 if shared_size else dims.ffn_pages
        gate, up = Source(f"{hf}.gate_proj.weight", shape, rows), Source(f"{hf}.up_proj.weight", shape, rows)
        down = Source(f"{hf}.down_proj.weight", shape[::-1], rows, axis=1)
        gate_up = ParamSpec(f"{kind}.gate_up", (gate, up), (2 * shard, hidden), **common, min_pages=2 * pages)
        self.gate_up = shards(dims, gate_up, tp)
        self.down = shards(dims, ParamSpec(f"{kind}.down", (down,), (hidden, shard), **common, min_pages=pages), tp)

    def __call__(self, x: Float[Array, "D N"]) -> Float[Array, "D N"]:
        return rank_sum(self.partial(x), self.tp).astype(x.dtype)

    def partial(self, x: Float[Array, "D N"]) -> Float[Array, "D N"]:
        """Return this rank's part of the result, in f32. The sum of the parts of all ranks is the result."""
        total = jnp.zeros((), jnp.float32)
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            gate, up = jnp.split(matmul(gate_up[...], x), 2)
            total = total + matmul(down[...], ACTIVATIONS[self.activation](gate, up).astype(x.dtype))
        return total
