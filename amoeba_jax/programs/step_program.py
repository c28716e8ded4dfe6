"""A step of one segment as a program that is compiled ahead of time."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from amoeba_jax.models.decoder import DecoderLayer, Segment, SegmentPlan, SegmentShape, is_sharded, leaf_variables
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.models.layers import QueryGroup, StepContext
from amoeba_jax.programs.batch import BatchShape, unpack
from amoeba_jax.sampling.sampler import argmax, for_host
from kvcache.page_lists import split_by_extent
from sharding.mesh import TP_AXIS, SubMesh

LogitsOf = Literal["last", "all"]


@dataclass(frozen=True)
class StepKey:
    """What an executable is for. Two steps with equal keys run the same executable.

    Attributes:
        devices: indices of the group's devices in the pool.
        segment: layers, embedding, head.
        batch: bucket of the step.
        extent_pages: pages of each KV extent of a layer, the same for all layers.
        num_slots: sequences whose last tokens the device remembers.
        logits_of: positions that a head computes: the last of each row, or all tokens of the step.
    """

    devices: tuple[int, ...]
    segment: SegmentShape
    batch: BatchShape
    extent_pages: tuple[int, ...]
    num_slots: int
    logits_of: LogitsOf = "last"

    @property
    def family(self) -> Hashable:
        """What it says without the devices themselves."""
        return len(self.devices), self.segment, self.batch, self.extent_pages, self.num_slots, self.logits_of

    def __str__(self) -> str:
        parts = [
            f"TP{len(self.devices)}{list(self.devices)}",
            str(self.batch),
            f"{self.segment.num_layers} layers",
        ]
        parts += ["embedding"] * self.segment.embedding + [f"head ({self.logits_of})"] * self.segment.head
        return " ".join(parts)


class HeadOutput(NamedTuple):
    """What a step's head returns, the same on every rank. R is the step's rows, or its tokens for logits of `"all"`."""

    likeliest: Int32[Array, " R"]
    """For the host: `NO_TOKEN` where logits are not numbers."""
    logits: Float[Array, "V R"]
    last_tokens: Int32[Array, " S"]
    """With the likeliest token of each row in its slot."""


@dataclass(frozen=True)
class StepProgram:
    """A step of one segment, the same for all groups of one degree. `compile` makes it the program of one of them.

    That is called with `(weights, kv, inputs, packed, last_tokens)`: `weights` the segment's leaves as `leaf_variables`
    orders them, `kv` one list of extents per layer (donated: the returned ones are the same memory), `inputs` hidden
    states `[D, N]` or None where the segment starts with the embedding, `packed` the step's batch `[tp, size]`,
    `last_tokens` `[num_slots]`, the token last sampled for each slot, or None for a segment without embedding and head.
    It returns `(kv, hidden states, head)`, where head is a `HeadOutput` or None.

    Attributes:
        function: under `shard_map` over a mesh without devices, so that JAX traces and lowers it once for all groups.
        arguments: shapes of what it takes.
        sharded_weights: which of the leaves differ between ranks.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    sharded_weights: tuple[bool, ...]

    def compile(self, group: SubMesh) -> jax.stages.Compiled:
        """Lower and compile it for a group."""
        weights = [group.sharded if sharded else group.replicated for sharded in self.sharded_weights]
        jitted = jax.jit(
            self.function,
            donate_argnums=(1,),
            keep_unused=True,
            in_shardings=(weights, group.sharded, group.replicated, group.sharded, group.replicated),
            out_shardings=(group.sharded, group.replicated, group.replicated),
        )
        return jitted.lower(*self.arguments).compile()


def segment_keys(
    group: SubMesh,
    plans: Iterable[SegmentPlan],
    batch: BatchShape,
    extent_pages: tuple[int, ...],
    num_slots: int,
    logits_of: LogitsOf = "last",
) -> list[StepKey]:
    """Keys of the programs that make up a step of a whole model, one for each segment."""
    return [
        StepKey(
            group.device_indices,
            plan.shape,
            batch,
            extent_pages if plan.shape.num_layers else (),
            num_slots,
            logits_of if plan.shape.head else "last",
        )
        for plan in plans
    ]


def step_program(dims: ModelDims, plan: SegmentPlan, key: StepKey) -> StepProgram:
    """The step that `key` describes, of which only the number of devices counts."""
    tp = len(key.devices)
    segment = Segment(dims, plan, tp)
    graph, state = nnx.split(segment)
    variables = leaf_variables(segment)
    treedef = jax.tree.structure(state)
    shape = key.batch
    # One function for layers that compute alike: traced and lowered once, and inlined by XLA.
    calls = {window: _layer_call(layer) for window, layer in zip(plan.shape.windows, segment.layers, strict=True)}

    def step(
        weights: list[jax.Array],
        kv: list[list[jax.Array]],
        inputs: jax.Array | None,
        packed: jax.Array,
        last_tokens: jax.Array | None,
    ):
        matrices = [
            weight.reshape(variable.get_metadata()["spec"].chunk_shape)
            for weight, variable in zip(weights, variables, strict=True)
        ]
        model = nnx.merge(graph, jax.tree.unflatten(treedef, matrices))
        fields = unpack(packed[0], shape)
        x = model.embedding(_input_tokens(fields, last_tokens)) if model.embedding is not None else inputs
        assert x is not None, "a segment starts with the embedding or with hidden states"
        context = _context(dims, shape, tp, key.extent_pages, fields) if plan.layers else None
        new_kv = []
        for window, layer, extents in zip(plan.shape.windows, model.layers, kv, strict=True):
            x, extents = calls[window](jax.tree.leaves(nnx.state(layer)), x, extents, context)
            new_kv.append(extents)
        if model.head is None:
            return new_kv, x, None
        assert last_tokens is not None, "a segment with the head records tokens"
        logits = model.head(x if key.logits_of == "all" else x[:, fields["last_token"]])
        likeliest, peak = argmax(logits)
        sampled = likeliest[fields["last_token"]] if key.logits_of == "all" else likeliest
        slots = jnp.where(fields["slots"] < 0, key.num_slots, fields["slots"])  # past the end: dropped
        last_tokens = last_tokens.at[slots].set(sampled, mode="drop")
        return new_kv, None, HeadOutput(for_host(likeliest, peak), logits, last_tokens)

    dtype = jnp.dtype(dims.dtype)
    sharded = tuple(is_sharded(variable) for variable in variables)
    weights_abstract = [
        _global_shape(variable.get_metadata()["spec"].stored_shape, tp if differs else 1, dtype)
        for variable, differs in zip(variables, sharded, strict=True)
    ]
    kv_abstract = [
        [jax.ShapeDtypeStruct((tp * pages, dims.pages.page_elems), dtype) for pages in key.extent_pages]
        for _ in plan.layers
    ]
    inputs_abstract = (
        None if plan.shape.embedding else jax.ShapeDtypeStruct((dims.config.hidden_size, shape.num_tokens), dtype)
    )
    packed_abstract = jax.ShapeDtypeStruct((tp, shape.packed_size), jnp.int32)
    has_tokens = plan.shape.embedding or plan.shape.head
    tokens_abstract = jax.ShapeDtypeStruct((key.num_slots,), jnp.int32) if has_tokens else None
    weight_specs = [P(TP_AXIS) if differs else P() for differs in sharded]
    mapped = jax.shard_map(
        step,
        mesh=AbstractMesh((tp,), (TP_AXIS,), axis_types=(AxisType.Auto,)),
        in_specs=(weight_specs, P(TP_AXIS), P(), P(TP_AXIS), P()),
        out_specs=(P(TP_AXIS), P(), P()),
        check_vma=False,
    )
    return StepProgram(
        mapped, (weights_abstract, kv_abstract, inputs_abstract, packed_abstract, tokens_abstract), sharded
    )


def step_kv_bytes(dims: ModelDims, key: StepKey) -> int:
    """Bytes of the extents on each rank that a step updates in place."""
    itemsize = jnp.dtype(dims.dtype).itemsize
    return sum(key.extent_pages) * dims.pages.page_elems * itemsize * key.segment.num_layers


def _layer_call(layer: DecoderLayer) -> Callable[..., tuple[jax.Array, list[jax.Array]]]:
    """A layer as a function `(leaves, x, extents, context)`, for any layer that computes as this one does."""
    graph, state = nnx.split(layer)
    treedef = jax.tree.structure(state)

    def call(leaves: list[jax.Array], x: jax.Array, extents: list[jax.Array], context: StepContext):
        return nnx.merge(graph, jax.tree.unflatten(treedef, leaves))(x, extents, context)

    return jax.jit(call)


def _global_shape(local: tuple[int, ...], ranks: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((local[0] * ranks, *local[1:]), dtype)


def _input_tokens(fields: dict[str, jax.Array], last_tokens: jax.Array | None) -> jax.Array:
    """Tokens that the host knows, and in place of the others those that the previous steps sampled."""
    assert last_tokens is not None, "a segment with the embedding reads tokens"
    sources = fields["sources"]
    return jnp.where(sources >= 0, last_tokens[jnp.maximum(sources, 0)], fields["tokens"])


def _context(
    dims: ModelDims, shape: BatchShape, tp: int, extent_pages: tuple[int, ...], fields: dict[str, jax.Array]
) -> StepContext:
    """Rotary factors, write targets and per-extent tables, computed once for all layers of the program."""
    positions = fields["positions"]
    frequencies = jnp.asarray(dims.config.rope.inverse_frequencies(dims.config.head_dim))
    angles = positions.astype(jnp.float32)[:, None] * frequencies
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
    return StepContext(jnp.cos(angles), jnp.sin(angles), page, positions % dims.page_size, tuple(groups))
