"""Work list of a step: the segments that each home computes, and the transfers of hidden states between homes.

A home is a group of devices that compute a module together. A microbatch is a share of the sequences of an instance. A
run is a range of layers with the same homes. `sharding.placement` defines these terms.

A step computes either one microbatch or all microbatches. In a step of one microbatch, the tokens are the first columns
of every buffer of hidden states. In a step of all microbatches, the tokens of each microbatch are a *block* of columns.
All blocks are equally wide. A home has the blocks of its microbatches side by side, in the order of the microbatches:

    layers 5-14: microbatch 0 on device 0, microbatch 1 on device 1; blocks of 4 columns

    device 0   layers 0-4: blocks 0 1     layers 5-14: block 0          layers 15-29 and head: blocks 0 1
    device 1                     | copy   layers 5-14: block 1   | copy

A transfer moves hidden states from one run to the next. There are three kinds:

- `join`: one collective program moves all blocks from the parts of a home to the whole home.
- `split`: the reverse of `join`.
- `copy`: columns are copied from device to device.

A `join` ends at a single home, and a `split` starts from a single home. Each equal part of this home must have exactly
one microbatch, in order. Any other transfer is a `copy`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from amoeba_jax.models.decoder import SegmentPlan, embedding_plan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.programs.program_specs import ProgramSpec, ProgramSpecs
from amoeba_jax.programs.segments import SegmentCutter
from sharding.placement import Home, Homes, Placement

# Ratio of the numbers of columns for which programs copy hidden states.
_COPY_RATIO = 8

Blocks = tuple[int, ...]
"""Microbatches whose blocks of columns lie side by side in a buffer of hidden states, in this order."""


@dataclass(frozen=True)
class Compute:
    """Segments that one home (group of devices) computes, one after another.

    Attributes:
        home: devices that compute the segments together.
        segments: segments to compute, in order.
        blocks: microbatches (shares of the sequences) that the home computes. None: the step has only one microbatch.
        begins: whether the first segment begins the step with the embeddings of the tokens.
    """

    home: Home
    segments: tuple[SegmentPlan, ...]
    blocks: Blocks | None
    begins: bool = False

    def shape(self, step: BatchShape, num_microbatches: int) -> BatchShape:
        """Return the shape of the part of the step that this home computes.

        `step` is the shape of the whole step. `num_microbatches` is the number of microbatches of the placement.
        """
        if self.blocks is None or len(self.blocks) == num_microbatches:
            return step
        return BatchShape(((step.num_rows // num_microbatches * len(self.blocks), 1),), step.table_width)


@dataclass(frozen=True)
class ColumnCopy:
    """Copy of hidden states from one device to another, or to other columns on the same device.

    A block has the columns of one microbatch.

    Attributes:
        source: device that has the hidden states.
        source_block: index of the first block in the buffer of `source`.
        target: device that gets the hidden states.
        target_block: index of the first block in the buffer of `target`.
        blocks: number of blocks to copy. None: the step has one microbatch, and all its tokens are copied.
    """

    source: int
    source_block: int
    target: int
    target_block: int
    blocks: int | None


@dataclass(frozen=True)
class Transfer:
    """Transfer of hidden states between the homes of two runs of layers.

    Attributes:
        kind: `join` moves hidden states from the parts of `home` to the whole home. `split` is the reverse. `join` and
            `split` are one collective program each. `copy` copies columns from device to device.
        home: the whole home of a `join` or `split`. None for a `copy`.
        lower: degree of the parts of `home` in a `join` or `split`.
        copies: column copies that make up a `copy`. All sources are read before the first target is written.
    """

    kind: Literal["join", "split", "copy"]
    home: Home | None = None
    lower: int = 0
    copies: tuple[ColumnCopy, ...] = ()


Work = Compute | Transfer


def work_list(placement: Placement, microbatch: int | None, cutter: SegmentCutter) -> tuple[Work, ...]:
    """Return the computations and transfers of a step, in order.

    The first computation includes the embedding. The last transfer, if needed, moves the hidden states to the home of
    the head.

    Args:
        placement: placement of the instance.
        microbatch: index of the only microbatch of the step. None: the step has all microbatches, in blocks.
        cutter: object that cuts layers into segments.
    """
    return _WorkList(placement, microbatch, cutter).build()


class _WorkList:
    def __init__(self, placement: Placement, microbatch: int | None, cutter: SegmentCutter):
        self._placement, self._cutter = placement, cutter
        if microbatch is None and placement.num_microbatches == 1:
            microbatch = 0
        self._microbatch = microbatch
        self._work: list[Work] = []
        self._at: dict[Home, Blocks] = {}
        """Homes that have the hidden states at this point of the list.

        For each home, the microbatches whose blocks it has.
        """

    def build(self) -> tuple[Work, ...]:
        placement = self._placement
        first = self._arranged(placement.runs[0].homes)
        begins = all(placement.head.contains(home) for home in first)
        if not begins:
            self._at = self._arranged((placement.head,) * placement.num_microbatches)
            self._compute(placement.head, (embedding_plan(),), begins=True)
        for run in placement.runs:
            self._move_to(self._arranged(run.homes))
            for home in self._at:
                segments = self._cutter.cut(run.layers, run.module, embeds=placement.head.contains(home))
                self._compute(home, segments, begins=begins and run is placement.runs[0])
        self._move_to(self._arranged((placement.head,) * placement.num_microbatches))
        return tuple(self._work)

    def _arranged(self, homes: Homes) -> dict[Home, Blocks]:
        if self._microbatch is not None:
            return {homes[self._microbatch]: (self._microbatch,)}
        return {home: tuple(m for m, other in enumerate(homes) if other == home) for home in sorted(set(homes))}

    def _compute(self, home: Home, segments: tuple[SegmentPlan, ...], *, begins: bool) -> None:
        blocks = self._at[home] if self._microbatch is None else None
        self._work.append(Compute(home, segments, blocks, begins))

    def _move_to(self, wanted: dict[Home, Blocks]) -> None:
        """Append a transfer of the hidden states to the homes `wanted`, if the hidden states are not there already."""
        before, self._at = self._at, wanted
        if not before or before == wanted:
            return
        if self._microbatch is None and (collective := _collective(before, wanted)) is not None:
            self._work.append(collective)
            return
        copies = self._copies(before, wanted)
        if copies:
            self._work.append(Transfer("copy", copies=tuple(copies)))

    def _copies(self, before: dict[Home, Blocks], wanted: dict[Home, Blocks]) -> list[ColumnCopy]:
        places = {microbatch: (home, block) for home, of in before.items() for block, microbatch in enumerate(of)}
        found: list[ColumnCopy] = []
        for target, microbatches in wanted.items():
            for rank, device in enumerate(target.devices):
                mine: list[ColumnCopy] = []
                for block, microbatch in enumerate(microbatches):
                    source, source_block = places[microbatch]
                    here = device in source.devices
                    if here and source_block == block:
                        continue
                    origin = device if here else source.devices[rank % source.degree]
                    last = mine[-1] if mine else None
                    if (
                        last is not None
                        and last.blocks is not None
                        and (
                            (last.source, last.source_block + last.blocks, last.target_block + last.blocks)
                            == (origin, source_block, block)
                        )
                    ):
                        mine[-1] = ColumnCopy(origin, last.source_block, device, last.target_block, last.blocks + 1)
                        continue
                    count = 1 if self._microbatch is None else None
                    mine.append(ColumnCopy(origin, source_block, device, block, count))
                found += mine
        return found


def work_specs(
    plan: EnginePlan,
    specs: ProgramSpecs,
    work: Work,
    step: BatchShape,
    num_microbatches: int,
    extent_pages: Mapping[Home, tuple[int, ...]],
) -> list[ProgramSpec]:
    """Return the programs of one item of a work list, in order.

    A `Compute` has a program for each segment. Segments of equal shape have the same spec object. A `join` or `split`
    has one program. A `copy` has two programs for each of its copies, one to read columns and one to write them.

    Args:
        plan: sizes of the engine.
        specs: factory of specs.
        work: item of the work list.
        step: shape of the step.
        num_microbatches: number of microbatches of the placement.
        extent_pages: number of pages of each extent of a layer on a rank, by home.
    """
    pool, width = plan.sub_meshes, plan.hidden_tokens
    if isinstance(work, Compute):
        group, at = pool.group(work.home.start, work.home.degree), work.shape(step, num_microbatches)
        kinds = {(one.kinds, one.module, one.embeds): one for one in work.segments}
        made = {kind: plan.layers_spec(specs, group, one, at, extent_pages[work.home]) for kind, one in kinds.items()}
        return [made[one.kinds, one.module, one.embeds] for one in work.segments]
    if work.home is not None:
        group, make = pool.group(work.home.start, work.home.degree), specs.join if work.kind == "join" else specs.split
        return [make(group, work.lower, plan.most_rows(work.lower), width)]
    found = []
    for copy in work.copies:
        if copy.blocks is None:
            columns = copied_columns(step.num_tokens, width)
        else:
            columns = copy.blocks * (step.num_rows // num_microbatches)
        found.append(specs.take_columns(pool.group(copy.source, 1), columns, width))
        found.append(specs.put_columns(pool.group(copy.target, 1), columns, width))
    return found


def copied_columns(num_tokens: int, hidden_tokens: int) -> int:
    """Return the number of columns that a program copies for a step of one microbatch with `num_tokens` tokens.

    This is `num_tokens`, rounded up to a power of `_COPY_RATIO`, but at most `hidden_tokens`. The rounding keeps the
    number of different programs small.
    """
    columns = 1
    while columns < num_tokens:
        columns *= _COPY_RATIO
    return min(columns, hidden_tokens)


def _collective(before: dict[Home, Blocks], after: dict[Home, Blocks]) -> Transfer | None:
    """Return the `join` or `split` that moves all blocks. Return None if no single program can move them.

    The smaller homes must be the equal parts of the larger home. Each part must have exactly one block, in the order of
    the microbatches.
    """
    for kind, parts, wholes in (("join", before, after), ("split", after, before)):
        ((whole, blocks), *others), lower = wholes.items(), next(iter(parts)).degree
        if others or not 2 <= len(parts) == len(blocks) or whole.degree != lower * len(parts):
            continue
        starts = range(whole.start, whole.start + whole.degree, lower)
        if parts == {Home(start, lower): (block,) for start, block in zip(starts, sorted(blocks), strict=True)}:
            return Transfer("join" if kind == "join" else "split", whole, lower)
    return None
