"""Programs of a step: one program for each segment (run of layers), and one program for the head."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from amoeba_jax.cpu_cache import Options
from amoeba_jax.models.decoder import DecoderLayer, Segment, SegmentPlan, head_plan, is_sharded, leaf_variables
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.models.kinds import LayerKind
from amoeba_jax.models.layers import QueryGroup, StepContext
from amoeba_jax.models.rope import RopeConfig
from amoeba_jax.programs.batch import BatchShape, row_fields, unpack
from amoeba_jax.sampling.sampler import argmax, for_host
from kvcache.exchange import exchange_pieces
from kvcache.migration import phase_shape
from kvcache.page_lists import split_by_extent
from sharding.mesh import TP_AXIS, SubMesh
from sharding.params import ParamSpec

LogitsOf = Literal["last", "all"]


class PageExchange(NamedTuple):
    """One phase of a page exchange, which runs inside the program of a step.

    In a phase (`kvcache.migration.Phase`), ranks exchange pieces of pages. The pages belong to layers that the program
    does not compute.

    Attributes:
        num_layers: number of layers whose pages move.
        extent_pages: number of pages of each extent of these layers.
        phase_pieces: argument `phase_pieces` of `kvcache.migration.plan_phases`.
        distance: each rank `r` exchanges pieces with rank `r ^ distance`. None: all ranks exchange pieces with each
            other.
    """

    num_layers: int
    extent_pages: tuple[int, ...]
    phase_pieces: int
    distance: int | None


@dataclass(frozen=True)
class StepKey:
    """Key of the program that computes a segment in a step.

    Attributes:
        devices: indices of the group's devices in the pool.
        kinds: kinds of the segment's layers.
        batch: shape of the step.
        extent_pages: number of pages of each extent of a layer. All layers have the same extents.
        num_slots: number of entries of `last_tokens` (`StepProgram`).
        hidden_tokens: number of tokens in the buffer of hidden states.
        exchange: page exchange that the program also runs, for layers outside the segment. None: no exchange.
        module: computed part of each layer, or `embedding` (`SegmentPlan.module`).
        embeds: whether the program can begin a step with the embeddings of the tokens.
    """

    devices: tuple[int, ...]
    kinds: tuple[LayerKind, ...]
    batch: BatchShape
    extent_pages: tuple[int, ...]
    num_slots: int
    hidden_tokens: int
    exchange: PageExchange | None = None
    module: str = "layer"
    embeds: bool = True

    @property
    def family(self) -> Hashable:
        """Key without device indices. Programs with the same family differ only in their devices."""
        sizes = self.batch, self.extent_pages, self.num_slots, self.hidden_tokens
        return len(self.devices), self.kinds, *sizes, self.exchange, self.module, self.embeds

    def __str__(self) -> str:
        suffix = "" if self.exchange is None else f", with an exchange of pages of {self.exchange.num_layers} others"
        what = "embedding" if self.module == "embedding" else f"{len(self.kinds)} layers"
        what += f" ({self.module})" if self.module in ("attention", "ffn") else ""
        return f"TP{len(self.devices)}{list(self.devices)} {self.batch} {what}{suffix}"


@dataclass(frozen=True)
class HeadKey:
    """Key of the program that computes the head (final norm and logits) in a step.

    Attributes:
        devices: indices of the group's devices in the pool.
        num_rows: number of rows (sequences) of the step.
        num_tokens: number of tokens of the step, if the head computes the logits of all tokens. 0: the head computes
            the logits of the last token of each row.
        num_slots: number of entries of `last_tokens` (`StepProgram`).
        hidden_tokens: number of tokens in the buffer of hidden states.
    """

    devices: tuple[int, ...]
    num_rows: int
    num_tokens: int
    num_slots: int
    hidden_tokens: int

    @property
    def family(self) -> Hashable:
        """Key without device indices. Programs with the same family differ only in their devices."""
        return "head", len(self.devices), self.num_rows, self.num_tokens, self.num_slots, self.hidden_tokens

    def __str__(self) -> str:
        wanted = f"all of {self.num_tokens} tokens" if self.num_tokens else "last tokens"
        return f"TP{len(self.devices)}{list(self.devices)} head of {self.num_rows} rows ({wanted})"


class HeadOutput(NamedTuple):
    """Result of the program of the head, equal on every rank.

    V is the size of the vocabulary. R is the number of tokens whose logits the head computes. These are either the last
    tokens of all rows of the step, or all tokens of the step.
    """

    argmax_ids: Int32[Array, " R"]
    """Greedy tokens for the host; `NO_TOKEN` in rows whose logits are NaN."""
    logits: Float[Array, "V R"]
    last_tokens: Int32[Array, " slots"]
    """Last token of each slot. Each row's greedy token is already in its slot."""


@dataclass(frozen=True)
class StepProgram:
    """Program of a segment or of the head, for all groups of one degree. `compile` returns the executable of one group.

    The program of a segment is a function `(weights, kv, hidden, packed, last_tokens, first) -> (kv, hidden)`:
        weights: weights of the segment, in the order of `leaf_variables`.
        kv: one list of extents for each layer, donated. Empty for FFNs.
        hidden: hidden states, `[D, hidden_tokens]`, donated. The first columns are the tokens of the step.
        packed: `StepBatch.packed`. Dense FFNs do not take it.
        last_tokens: last sampled token of each slot, `[num_slots]`.
        first: bool scalar. If true, the segment begins the step, with the embeddings of the tokens. Segments that do
            not embed take neither `last_tokens` nor `first`.

    If layers have experts, the argument `hidden` and the result `hidden` are tuples `(hidden, loads)`, and the function
    takes one more argument, `layer`:
        loads: number of tokens of each expert of each layer of the model, `[layers, E]`, donated. The first rank adds
            the tokens of the step, without padding. The other ranks add nothing.
        layer: int32 scalar, index of the first layer of the segment.

    With an exchange, the function also takes `(others, send, receive)` and returns `others`. `others` are the extents
    of the layers whose pages move, donated. `send` and `receive` are the arrays of a `kvcache.migration.Phase`, with
    the shape `[tp, 1, *pieces]`. The step and the exchange do not depend on each other, so XLA can compute while pages
    move between devices.

    The program of the head is a function `(weights, hidden, rows, last_tokens) -> HeadOutput`. The argument `rows` is
    `StepBatch.rows`. No argument is donated.

    Attributes:
        function: the function under `shard_map`. Its mesh has no devices, so that one trace serves all groups.
        arguments: shapes and dtypes of the arguments.
        specs: partition of each argument over the ranks. The weights have a list of partitions.
        outputs: partition of each result over the ranks.
        donated: indices of the donated arguments.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    specs: tuple[Any, ...]
    outputs: Any
    donated: tuple[int, ...]

    def compile(self, group: SubMesh, options: Options | None = None) -> jax.stages.Compiled:
        """Compile the program for the devices of a group. `options` are passed to XLA."""
        return self.lower(group).compile(options)

    def lower(self, group: SubMesh, platforms: tuple[str, ...] | None = None) -> jax.stages.Lowered:
        """Lower the program for the devices of a group.

        `platforms` has the names of the platforms to lower for. None: the platform of the group.
        """
        shardings = {P(TP_AXIS): group.sharded, P(): group.replicated}
        weights = [shardings[spec] for spec in self.specs[0]]
        inputs = weights, *(shardings[spec] for spec in self.specs[1:])
        outputs = jax.tree.map(shardings.__getitem__, self.outputs, is_leaf=lambda leaf: isinstance(leaf, P))
        jitted = jax.jit(
            self.function, donate_argnums=self.donated, keep_unused=True, in_shardings=inputs, out_shardings=outputs
        )
        return jitted.trace(*self.arguments).lower(lowering_platforms=platforms)


def step_program(dims: ModelDims, plan: SegmentPlan, key: StepKey) -> StepProgram:
    """Trace the program that computes the segment `plan`. `key` gives the sizes and the number of devices."""
    tp, shape = len(key.devices), key.batch
    segment = Segment(dims, plan, tp)
    graph, state = nnx.split(segment)
    variables, treedef = leaf_variables(segment), jax.tree.structure(state)
    # Layers of the same kind share a function, which is traced and lowered once and inlined by XLA.
    calls = {kind: _layer_call(layer) for kind, layer in zip(plan.kinds, segment.layers, strict=True)}

    def step(weights: list[jax.Array], kv: list[list[jax.Array]], states: Any, *rest: jax.Array):
        inputs = dict(zip(names, rest, strict=True))
        model = nnx.merge(graph, jax.tree.unflatten(treedef, _matrices(weights, variables)))
        loads: Any = None
        hidden, loads = states if plan.has_experts else (states, loads)
        x, context, new_kv = hidden[:, : shape.num_tokens], None, []
        if plan.takes_batch:
            fields = unpack(inputs["packed"][0], shape.fields)
            if plan.embeds:
                x = _embedded(model, fields, inputs["last_tokens"], x, inputs["first"])
            if plan.module == "ffn":  # experts only need to know the padding
                context = StepContext((), fields["positions"], fields["positions"], ())
            elif plan.layers:
                context = _context(dims, shape, tp, key.extent_pages, fields)
        for index, (kind, layer) in enumerate(zip(plan.kinds, model.layers, strict=True)):
            leaves, extents = jax.tree.leaves(nnx.state(layer)), kv[index] if kv else []
            x, extents, chosen = calls[kind](leaves, x, extents, context)
            new_kv.append(extents)
            if chosen is not None:
                one = (jax.lax.axis_index(TP_AXIS) == 0).astype(loads.dtype) if tp > 1 else 1
                loads = loads.at[inputs["layer"] + index, chosen.reshape(-1)].add(one, mode="drop")
        hidden = jax.lax.dynamic_update_slice(hidden, x, (0, 0))
        return new_kv if kv else [], (hidden, loads) if plan.has_experts else hidden

    dtype = jnp.dtype(dims.dtype)
    kv = [
        [jax.ShapeDtypeStruct((tp * pages, dims.pages.page_elems), dtype) for pages in key.extent_pages]
        for _ in (plan.layers if plan.module != "ffn" else ())
    ]
    sharded = tuple(is_sharded(variable) for variable in variables)
    states: Any = jax.ShapeDtypeStruct((dims.config.hidden_size, key.hidden_tokens), dtype)
    if plan.has_experts:
        states = states, jax.ShapeDtypeStruct(dims.load_shape, jnp.uint32)
    further: dict[str, tuple[jax.ShapeDtypeStruct, P]] = {}
    if plan.takes_batch:
        further["packed"] = jax.ShapeDtypeStruct((tp, shape.packed_size), jnp.int32), P(TP_AXIS)
    if plan.embeds:
        further["last_tokens"] = jax.ShapeDtypeStruct((key.num_slots,), jnp.int32), P()
        further["first"] = jax.ShapeDtypeStruct((), jnp.bool_), P()
    if plan.has_experts:
        further["layer"] = jax.ShapeDtypeStruct((), jnp.int32), P()
    names = tuple(further)
    arguments = (_abstract_weights(variables, sharded, tp, dtype), kv, states, *(it for it, _ in further.values()))
    specs: tuple[Any, ...] = (_specs(sharded), P(TP_AXIS), P(), *(spec for _, spec in further.values()))
    outputs, donated = (P(TP_AXIS), P()), (1, 2)
    if (exchange := key.exchange) is None:
        return StepProgram(_mapped(step, tp, specs, outputs), arguments, specs, outputs, donated)
    count, distance = len(exchange.extent_pages), exchange.distance

    def step_and_exchange(*arguments: Any):
        *of_step, others, send, receive = arguments
        new_kv, hidden = step(*of_step)
        return new_kv, hidden, [exchange_pieces(it, count, count, send[0, 0], receive[0, 0], distance) for it in others]

    ids = jax.ShapeDtypeStruct((tp, 1, *phase_shape(tp, exchange.phase_pieces, distance)), jnp.int32)
    shapes = [(tp * pages, dims.pages.page_elems) for pages in exchange.extent_pages]
    others = [[jax.ShapeDtypeStruct(it, dtype) for it in shapes] for _ in range(exchange.num_layers)]
    specs, outputs, donated = (*specs, *[P(TP_AXIS)] * 3), (P(TP_AXIS), P(), P(TP_AXIS)), (1, 2, len(arguments))
    mapped = _mapped(step_and_exchange, tp, specs, outputs)
    return StepProgram(mapped, (*arguments, others, ids, ids), specs, outputs, donated)


def head_program(dims: ModelDims, key: HeadKey) -> StepProgram:
    """Trace the program of the head. `key` gives the sizes and the number of devices."""
    tp = len(key.devices)
    segment = Segment(dims, head_plan(dims), tp)
    graph, state = nnx.split(segment)
    variables, treedef = leaf_variables(segment), jax.tree.structure(state)

    def head(weights: list[jax.Array], hidden: jax.Array, rows: jax.Array, last_tokens: jax.Array):
        model = nnx.merge(graph, jax.tree.unflatten(treedef, _matrices(weights, variables)))
        fields = unpack(rows[0], row_fields(key.num_rows))
        wanted = hidden[:, : key.num_tokens] if key.num_tokens else hidden[:, fields["last_token"]]
        assert model.head is not None, "the segment is the head"
        logits = model.head(wanted)
        argmax_ids, max_logit = argmax(logits)
        sampled = argmax_ids[fields["last_token"]] if key.num_tokens else argmax_ids
        slots = jnp.where(fields["slots"] < 0, key.num_slots, fields["slots"])  # an index past the end is dropped
        last_tokens = last_tokens.at[slots].set(sampled, mode="drop")
        return HeadOutput(for_host(argmax_ids, max_logit), logits, last_tokens)

    dtype = jnp.dtype(dims.dtype)
    sharded = tuple(is_sharded(variable) for variable in variables)
    arguments = (
        _abstract_weights(variables, sharded, tp, dtype),
        jax.ShapeDtypeStruct((dims.config.hidden_size, key.hidden_tokens), dtype),
        jax.ShapeDtypeStruct((tp, 2 * key.num_rows), jnp.int32),
        jax.ShapeDtypeStruct((key.num_slots,), jnp.int32),
    )
    specs = _specs(sharded), P(), P(TP_AXIS), P()
    return StepProgram(_mapped(head, tp, specs, P()), arguments, specs, P(), ())


def _matrices(weights: list[jax.Array], variables: list[nnx.Variable]) -> list[jax.Array]:
    """Reshape weights from the shapes in which they are stored to the shapes for computation (`ParamSpec.shard_shape`).

    If a model has FFNs of different sizes, the smaller FFNs are stored with padding (`ModelDims.ffn_pages`). This
    function cuts off the padding of dense FFNs, which copies their weights. Experts keep their padding.
    """
    return [
        _matrix(weight, variable.get_metadata()["spec"]) for weight, variable in zip(weights, variables, strict=True)
    ]


def _matrix(weight: jax.Array, spec: ParamSpec) -> jax.Array:
    if weight.size == (used := math.prod(spec.shard_shape)):
        return weight.reshape(spec.shard_shape)
    if spec.sources[0].blocks is not None:
        return weight  # experts: they are sliced one by one (`MixtureOfExperts`)
    return weight.reshape(-1)[:used].reshape(spec.shard_shape)


def _abstract_weights(
    variables: list[nnx.Variable], sharded: tuple[bool, ...], tp: int, dtype: Any
) -> list[jax.ShapeDtypeStruct]:
    return [
        _global_shape(variable.get_metadata()["spec"].stored_shape, tp if differs else 1, dtype)
        for variable, differs in zip(variables, sharded, strict=True)
    ]


def _specs(sharded: tuple[bool, ...]) -> list[P]:
    return [P(TP_AXIS) if differs else P() for differs in sharded]


def _mapped(function: Callable[..., Any], tp: int, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    mesh = AbstractMesh((tp,), (TP_AXIS,), axis_types=(AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _embedded(
    model: Any, fields: dict[str, jax.Array], last_tokens: jax.Array, hidden: Float[Array, "D N"], first: jax.Array
) -> Float[Array, "D N"]:
    """Return the input of the layers: the embeddings of the tokens if `first` is true, else `hidden`.

    If a token has a slot in `fields["sources"]`, its id is in this slot of `last_tokens`. If not, its id is in
    `fields["tokens"]`.
    """
    sources = fields["sources"]

    def embed() -> jax.Array:
        tokens = jnp.where(sources >= 0, last_tokens[jnp.maximum(sources, 0)], fields["tokens"])
        return model.embedding(tokens).astype(hidden.dtype)

    # On CPU, a branch skips the embedding in later segments. On a GPU, XLA's host thread would wait there.
    return jax.lax.platform_dependent(
        cpu=lambda: jax.lax.cond(first, embed, lambda: hidden), default=lambda: jnp.where(first, embed(), hidden)
    )


def step_donated_bytes(dims: ModelDims, key: StepKey) -> int:
    """Return the bytes of extents, hidden states and expert loads that a program updates in place on each rank."""
    itemsize = jnp.dtype(dims.dtype).itemsize
    hidden = key.hidden_tokens * dims.config.hidden_size * itemsize
    if key.module in ("layer", "ffn") and any(kind.has_experts for kind in key.kinds):
        hidden += 4 * math.prod(dims.load_shape)
    num_pages = 0 if key.module == "ffn" else sum(key.extent_pages) * len(key.kinds)
    if key.exchange is not None:
        num_pages += sum(key.exchange.extent_pages) * key.exchange.num_layers
    return hidden + num_pages * dims.pages.page_elems * itemsize


def _layer_call(layer: DecoderLayer) -> Callable[..., tuple[jax.Array, list[jax.Array], jax.Array | None]]:
    """Return a function that computes any layer of the kind of `layer`. `leaves` are the weights of that layer."""
    graph, state = nnx.split(layer)
    treedef = jax.tree.structure(state)

    def call(leaves: list[jax.Array], x: jax.Array, extents: list[jax.Array], context: StepContext | None):
        return nnx.merge(graph, jax.tree.unflatten(treedef, leaves))(x, extents, context)

    return jax.jit(call)


def _global_shape(local: tuple[int, ...], ranks: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((local[0] * ranks, *local[1:]), dtype)


def _context(
    dims: ModelDims, shape: BatchShape, tp: int, extent_pages: tuple[int, ...], fields: dict[str, jax.Array]
) -> StepContext:
    """Return the inputs that all layers share: rotary factors, the pages to write, and block tables for each extent."""
    positions = fields["positions"]
    ropes = [rope for rope in (dims.config.rope, dims.config.local_rope) if rope is not None]
    rotary = tuple(_rotary(rope, positions, dims.config.head_dim) for rope in ropes)
    starts = [0]
    for pages in extent_pages:
        starts.append(starts[-1] + pages * tp)
    groups, token_rows, first_row, first_token = [], [], 0, 0
    for batch, length in shape.groups:
        rows = slice(first_row, first_row + batch)
        tables = split_by_extent(fields["tables"][rows], fields["num_pages"][rows], tuple(starts))
        group_positions = positions[first_token : first_token + batch * length].reshape(batch, length)
        groups.append(QueryGroup(group_positions, tables))
        token_rows.append(jnp.repeat(jnp.arange(first_row, first_row + batch), length))
        first_row, first_token = first_row + batch, first_token + batch * length
    row = jnp.concatenate(token_rows)
    page = fields["tables"][row, jnp.maximum(positions, 0) // dims.page_size]
    page = jnp.where(positions >= 0, page, -1)
    return StepContext(rotary, page, positions % dims.page_size, tuple(groups))


def _rotary(rope: RopeConfig, positions: Int32[Array, " N"], head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines of the rotary embedding, `[N, h/2]` each. h is `head_dim`."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.inverse_frequencies(head_dim))
    if rope.attention_factor == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
