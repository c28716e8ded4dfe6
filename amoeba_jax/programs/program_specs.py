"""Descriptions of programs (specs).

A spec has the key of a program and a function that compiles the program. Specs need no device buffers.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from amoeba_jax.cpu_cache import few_kernels, step_options
from amoeba_jax.models.decoder import SegmentPlan, head_plan
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.page_copy import compile_page_copy, compile_page_read, compile_page_write
from amoeba_jax.programs.restore import compile_restore
from amoeba_jax.programs.step_program import (
    HeadKey,
    StepKey,
    StepProgram,
    head_program,
    step_donated_bytes,
    step_program,
)
from amoeba_jax.sampling import sampler
from amoeba_jax.sampling.rows import mask_words
from kvcache.exchange import ExchangeKind, compile_exchange
from sharding.mesh import SubMesh
from sharding.release import ReleasedShard

Make = TypeVar("Make", bound=Callable[..., "ProgramSpec"])
_I32, _F32 = jnp.int32, jnp.float32
# Number of traced steps kept for other groups of devices. Each takes a few MB.
_KEPT_STEPS = 16


class ProgramKey(NamedTuple):
    """Key of a program that computes neither a segment (`StepKey`) nor the head (`HeadKey`).

    Attributes:
        kind: name of the method of `ProgramSpecs` that describes the program.
        devices: indices of the devices that run the program.
        shape: sizes for which the program is compiled.
    """

    kind: str
    devices: tuple[int, ...]
    shape: tuple[Hashable, ...]

    def __str__(self) -> str:
        return f"{self.kind} on devices {list(self.devices)}, {self.shape}"


@dataclass(frozen=True)
class ProgramSpec:
    """Description of a program, from which the program can be compiled.

    Attributes:
        key: identity of the program. Specs with equal keys describe the same program.
        compile: function that compiles the program.
        donated_bytes: number of bytes on each device that the program must update in place.
        plan: a segment that the program computes (layers or the head). All segments of the same shape share the
            program. None: the program computes no segment.
        restored: shards of one layer that the program restores. All layers share the program. Empty if the program
            restores no weights.
        on: devices that run the program.
        first: function that returns the spec of the same program for the first group of this degree (from device 0 on).
            None: this spec is for the first group.
        model: sizes of the model as text. They are part of the key in the compile cache on disk.
    """

    key: StepKey | HeadKey | ProgramKey
    compile: Callable[[], jax.stages.Compiled] = field(compare=False, repr=False)
    donated_bytes: int = 0
    plan: SegmentPlan | None = None
    restored: tuple[ReleasedShard, ...] = ()
    on: tuple[jax.Device, ...] = field(default=(), compare=False, repr=False)
    first: "Callable[[], ProgramSpec] | None" = field(default=None, compare=False, repr=False)
    model: str = field(default="", compare=False, repr=False)

    @property
    def original(self) -> "ProgramSpec | None":
        """Spec of the same program for the first group of devices of this degree.

        None if this spec is for the first group. Also None if the two programs differ in more than their devices.
        """
        if self.first is None:
            return None
        first = self.first()
        return first if first.family == self.family else None

    @property
    def kind(self) -> str:
        """Kind of the program: `step`, `head` or `ProgramKey.kind`."""
        if isinstance(self.key, ProgramKey):
            return self.key.kind
        return "step" if isinstance(self.key, StepKey) else "head"

    @property
    def devices(self) -> tuple[int, ...]:
        """Indices, in the pool of devices, of the devices that run the program."""
        return self.key.devices

    @property
    def family(self) -> Hashable:
        """Key of the program without device indices. Programs of the same family differ only in their devices."""
        if isinstance(self.key, ProgramKey):
            return self.key.kind, len(self.key.devices), self.key.shape
        return self.key.family

    def __str__(self) -> str:
        return str(self.key)


def _of_any_group(make: Make) -> Make:
    """Decorate a method that returns the spec of a program on a group of devices.

    The decorator adds `on`, `first` and `model` to the spec.
    """

    @functools.wraps(make)
    def made(self: "ProgramSpecs", group: SubMesh, *args: Any, **kwargs: Any) -> ProgramSpec:
        spec = make(self, group, *args, **kwargs)
        first = None if group.first is group else functools.partial(made, self, group.first, *args, **kwargs)
        return replace(spec, on=group.devices[: len(spec.devices)], first=first, model=self.model)

    return cast(Make, made)


class ProgramSpecs:
    """Factory of the specs of all programs of a model.

    In all programs, logits have the shape `[V, R]`. R is the number of rows, or the number of tokens.
    """

    def __init__(self, dims: ModelDims):
        self.dims = dims
        self.model = repr(dims)
        self._dtype = jnp.dtype(dims.dtype)
        self._steps: OrderedDict[Hashable, StepProgram] = OrderedDict()
        self._lock = threading.Lock()

    # Steps

    def step(self, key: StepKey, plan: SegmentPlan, group: SubMesh) -> ProgramSpec:
        """Return the spec of the program that computes the segment `plan` in a step."""
        options = step_options(group.devices[0].platform)

        def compile() -> jax.stages.Compiled:
            return self._traced(key, lambda: step_program(self.dims, plan, key)).compile(group, options)

        first = None
        if group.first is not group:
            first = functools.partial(self.step, replace(key, devices=group.first.device_indices), plan, group.first)
        donated = step_donated_bytes(self.dims, key)
        return ProgramSpec(key, compile, donated, plan=plan, on=group.devices, first=first, model=self.model)

    def head(self, key: HeadKey, group: SubMesh) -> ProgramSpec:
        """Return the spec of the program that computes the head: final norm and logits."""

        def compile() -> jax.stages.Compiled:
            return self._traced(key, lambda: head_program(self.dims, key)).compile(group)

        first = None
        if group.first is not group:
            first = functools.partial(self.head, replace(key, devices=group.first.device_indices), group.first)
        return ProgramSpec(key, compile, plan=head_plan(self.dims), on=group.devices, first=first, model=self.model)

    def _traced(self, key: StepKey | HeadKey, make: Callable[[], StepProgram]) -> StepProgram:
        """Return the traced program of the family of `key`. If it is not cached, call `make` to trace it."""
        with self._lock:
            program = self._steps.get(key.family)
        if program is None:
            program = make()
            with self._lock:
                self._steps[key.family] = program
                while len(self._steps) > _KEPT_STEPS:
                    self._steps.popitem(last=False)
        return program

    @_of_any_group
    def split(self, group: SubMesh, lower: int, most_rows: int, hidden_tokens: int) -> ProgramSpec:
        """Return the spec of a program `(hidden, rows) -> hidden` that splits hidden states between parts of a group.

        A group has `tp / lower` parts of `lower` ranks each. Before the program runs, the buffer of every rank begins
        with the columns of all parts, in order. Each part has `rows` columns. After the program, the buffer of each
        rank begins with the columns of its own part. For example, with 2 parts and 3 rows, the ranks of the second part
        move columns 3-5 to columns 0-2.

        The program always moves `most_rows` columns, so that one program serves all smaller numbers of rows. The
        surplus columns are unused.

        `hidden` is `[tp * D, hidden_tokens]`, divided over the ranks, and is donated. `rows` is a scalar, the same on
        all ranks.
        """

        def split(hidden: jax.Array, rows: jax.Array) -> jax.Array:
            member = lax.axis_index("tp") // lower
            own = lax.dynamic_slice_in_dim(hidden, member * rows, most_rows, axis=1)
            return lax.dynamic_update_slice(hidden, own, (0, 0))

        return self._regroup("split", group, split, (lower, most_rows, hidden_tokens))

    @_of_any_group
    def join(self, group: SubMesh, lower: int, most_rows: int, hidden_tokens: int) -> ProgramSpec:
        """Return the spec of a program `(hidden, rows) -> hidden` that reverses `split`.

        Before the program runs, the buffer of each rank begins with the `rows` columns of its own part of the group.
        After the program, the buffer of every rank begins with the columns of all parts, in order. The arguments are
        those of `split`.
        """

        def join(hidden: jax.Array, rows: jax.Array) -> jax.Array:
            every = lax.all_gather(hidden[:, :most_rows], "tp")[::lower]
            for member, columns in enumerate(every):  # each overwrites the unused columns of the one before
                hidden = lax.dynamic_update_slice(hidden, columns, (0, member * rows))
            return hidden

        return self._regroup("join", group, join, (lower, most_rows, hidden_tokens))

    def _regroup(
        self,
        kind: str,
        group: SubMesh,
        function: Callable[[jax.Array, jax.Array], jax.Array],
        shape: tuple[int, int, int],
    ) -> ProgramSpec:
        hidden_size, num_tokens = self.dims.config.hidden_size, shape[-1]

        def compile() -> jax.stages.Compiled:
            run = jax.shard_map(function, mesh=group.mesh, in_specs=(P("tp"), P()), out_specs=P("tp"), check_vma=False)
            inputs = (group.sharded, group.replicated)
            jitted = jax.jit(run, donate_argnums=0, in_shardings=inputs, out_shardings=group.sharded)
            hidden = jax.ShapeDtypeStruct((group.tp * hidden_size, num_tokens), self._dtype)
            return jitted.lower(hidden, jax.ShapeDtypeStruct((), _I32)).compile()

        donated = hidden_size * num_tokens * self._dtype.itemsize
        return ProgramSpec(ProgramKey(kind, group.device_indices, shape), compile, donated)

    @_of_any_group
    def take_columns(self, group: SubMesh, num_tokens: int, hidden_tokens: int) -> ProgramSpec:
        """Return the spec of a program `(hidden, start) -> columns` that reads hidden states of some tokens.

        The program copies `num_tokens` columns, from column `start` on, out of the buffer `hidden`,
        `[D, hidden_tokens]`. The program runs on the first device of the group.
        """

        def take(hidden: jax.Array, start: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(hidden, start, num_tokens, axis=1)

        return self._columns("take_columns", group, take, (num_tokens, hidden_tokens), ())

    @_of_any_group
    def put_columns(self, group: SubMesh, num_tokens: int, hidden_tokens: int) -> ProgramSpec:
        """Return the spec of a program `(hidden, start, columns) -> hidden` that writes hidden states of some tokens.

        The program writes `num_tokens` columns, from column `start` on, into the buffer `hidden`, `[D, hidden_tokens]`.
        `hidden` is donated. The program runs on the first device of the group.
        """

        def put(hidden: jax.Array, start: jax.Array, columns: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(hidden, columns, start, axis=1)

        return self._columns("put_columns", group, put, (num_tokens, hidden_tokens), (0,))

    def _columns(
        self, kind: str, group: SubMesh, function: Callable[..., Any], shape: tuple[int, int], donate: tuple[int, ...]
    ) -> ProgramSpec:
        hidden_size, (num_tokens, hidden_tokens) = self.dims.config.hidden_size, shape

        def compile() -> jax.stages.Compiled:
            here = SingleDeviceSharding(group.devices[0])
            arguments = [
                jax.ShapeDtypeStruct((hidden_size, hidden_tokens), self._dtype),
                jax.ShapeDtypeStruct((), _I32),
                *[jax.ShapeDtypeStruct((hidden_size, num_tokens), self._dtype) for _ in donate],
            ]
            jitted = jax.jit(function, in_shardings=here, out_shardings=here, donate_argnums=donate)
            return jitted.lower(*arguments).compile()

        donated = hidden_size * hidden_tokens * self._dtype.itemsize if donate else 0
        return ProgramSpec(ProgramKey(kind, (group.start,), shape), compile, donated)

    # Sampling, on the first device of a group

    @_of_any_group
    def sample(self, group: SubMesh, rows: int, num_slots: int, packed: int) -> ProgramSpec:
        """Return the spec of the program that chooses the next tokens of `rows` sequences (`sampler.sample`).

        `packed` is the size of the program's packed argument, `sampling.rows.packed_size(rows)`.
        """
        shapes = [(self._logits(rows), _F32), ((num_slots,), _I32), ((packed,), _I32)]
        return self._on_first("sample", group, sampler.sample, shapes, small=True)

    @_of_any_group
    def sample_full(self, group: SubMesh, rows: int, num_slots: int, packed: int) -> ProgramSpec:
        """Return the spec of the program that chooses tokens of `rows` sequences of any kind (`sampler.sample_full`).

        The program donates `flags`. `packed` is the size of the program's packed argument,
        `sampling.rows.packed_size(rows, full=True)`.
        """
        state = (num_slots, self.dims.config.vocab_size)
        shapes = [(self._logits(rows), _F32), ((num_slots,), _I32), (state, _I32), (state, _F32), ((packed,), _I32)]
        shapes.append(((rows, mask_words(self.dims.config.vocab_size)), _I32))
        return self._on_first("sample_full", group, sampler.sample_full, shapes, donate=(2,), small=True)

    @_of_any_group
    def set_state(self, group: SubMesh, num_slots: int) -> ProgramSpec:
        """Return the spec of the program that replaces the sampling state of one slot (`sampler.set_state`).

        The program donates `flags` and `bias`.
        """
        row = (self.dims.config.vocab_size,)
        state = (num_slots, *row)
        shapes = [(state, _I32), (state, _F32), ((), _I32), (row, _I32), (row, _F32)]
        return self._on_first("set_state", group, sampler.set_state, shapes, donate=(0, 1))

    @_of_any_group
    def token_logprobs(self, group: SubMesh, tokens: int) -> ProgramSpec:
        """Return the spec of the program that computes log-probabilities of given tokens (`sampler.token_logprobs`).

        The program takes logits, `[V, tokens]`, and the target tokens, `[tokens]`.
        """
        shapes = [(self._logits(tokens), _F32), ((tokens,), _I32)]
        return self._on_first("token_logprobs", group, sampler.token_logprobs, shapes)

    @_of_any_group
    def take_column(self, group: SubMesh, tokens: int) -> ProgramSpec:
        """Return the spec of a program `(logits, index) -> column` that reads the logits of one of `tokens` tokens.

        The result is `logits[:, index : index + 1]`.
        """

        def take_column(logits: jax.Array, index: jax.Array):
            return lax.dynamic_slice_in_dim(logits, index, 1, axis=1)

        return self._on_first("take_column", group, take_column, [(self._logits(tokens), _F32), ((), _I32)])

    def _logits(self, rows: int) -> tuple[int, int]:
        return self.dims.config.vocab_size, rows

    def _on_first(
        self,
        kind: str,
        group: SubMesh,
        function: Callable[..., Any],
        arguments: list[tuple[tuple[int, ...], Any]],
        donate: tuple[int, ...] = (),
        small: bool = False,
    ) -> ProgramSpec:
        # Not inside `compile`: the first call of `few_kernels` compiles a program of its own.
        options = few_kernels(group.devices[0].platform) if small else None

        def compile() -> jax.stages.Compiled:
            here = SingleDeviceSharding(group.devices[0])
            jitted = jax.jit(function, in_shardings=here, out_shardings=here, donate_argnums=donate, keep_unused=True)
            lowered = jitted.lower(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments))
            return lowered.compile(options)

        shapes = tuple(shape for shape, _ in arguments)
        donated = sum(4 * shapes[index][0] * shapes[index][1] for index in donate)  # four bytes for each flag and bias
        return ProgramSpec(ProgramKey(kind, (group.start,), shapes), compile, donated)

    # Pages and weights

    @_of_any_group
    def page_copy(self, group: SubMesh, extent_pages: tuple[int, ...]) -> ProgramSpec:
        """Return the spec of the program that copies a page inside a layer (`compile_page_copy`)."""
        key = ProgramKey("page_copy", group.device_indices, (extent_pages,))
        donated = sum(extent_pages) * self._page_bytes
        return ProgramSpec(key, lambda: compile_page_copy(self.dims, group, extent_pages), donated)

    @_of_any_group
    def page_read(self, group: SubMesh, extent_pages: tuple[int, ...], num_pages: int) -> ProgramSpec:
        """Return the spec of the program that reads pages of a layer (`compile_page_read`)."""
        key = ProgramKey("page_read", group.device_indices, (extent_pages, num_pages))
        return ProgramSpec(key, lambda: compile_page_read(self.dims, group, extent_pages, num_pages))

    @_of_any_group
    def page_write(self, group: SubMesh, extent_pages: tuple[int, ...], num_pages: int) -> ProgramSpec:
        """Return the spec of the program that writes pages of a layer (`compile_page_write`)."""
        key = ProgramKey("page_write", group.device_indices, (extent_pages, num_pages))
        donated = sum(extent_pages) * self._page_bytes
        return ProgramSpec(key, lambda: compile_page_write(self.dims, group, extent_pages, num_pages), donated)

    @_of_any_group
    def exchange(
        self,
        group: SubMesh,
        old_extents: tuple[int, ...],
        new_extents: tuple[int, ...],
        phase_pieces: int,
        kind: ExchangeKind,
    ) -> ProgramSpec:
        """Return the spec of the program that exchanges page pieces between ranks (`compile_exchange`)."""
        key = ProgramKey("exchange", group.device_indices, (old_extents, new_extents, phase_pieces, kind))
        donated = sum(max(old_extents, new_extents, key=len)) * self._page_bytes

        def compile() -> jax.stages.Compiled:
            pages = self.dims.pages
            return compile_exchange(pages, self._dtype, group, old_extents, new_extents, phase_pieces, kind)

        return ProgramSpec(key, compile, donated)

    @_of_any_group
    def restore(self, group: SubMesh, released: tuple[ReleasedShard, ...], step_pages: int) -> ProgramSpec:
        """Return the spec of the program that restores the weights of a layer (`compile_restore`).

        All layers share this program.
        """
        dims = self.dims
        places = [tuple(one.shards[device % dims.max_tp] for device in group.device_indices) for one in released]
        shapes = [one.spec.stored_shape for one in released]
        key = ProgramKey("restore", group.device_indices, (tuple(shapes), tuple(places), step_pages))
        donated = sum(one.num_pages for one in released) * self._page_bytes

        def compile() -> jax.stages.Compiled:
            return compile_restore(released, dims.max_tp, self._dtype, group, step_pages)

        return ProgramSpec(key, compile, donated, restored=released)

    @property
    def _page_bytes(self) -> int:
        return self.dims.pages.page_elems * self._dtype.itemsize
