"""The work list of a step: which home computes which segments for which rows, and how hidden states travel.

A step is of one microbatch, whose tokens are the first columns of every buffer, or of all microbatches, in blocks of
equal width. A home then computes the blocks of its microbatches side by side, in their order:

    layers 5-14 on devices 0 and 1, two microbatches, blocks of 4 rows

    device 0   layers 0-4: blocks 0 1     layers 5-14: block 0          layers 15-29 and head: blocks 0 1
    device 1                     | copy   layers 5-14: block 1   | copy

If the layers go from the parts of an aligned group to the whole group, or back, one collective program moves the blocks
(`join`, `split`). Any other transfer copies columns from device to device.
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
"""Microbatches whose blocks of a step lie side by side."""


@dataclass(frozen=True)
class Compute:
    """Segments that one home computes.

    Attributes:
        blocks: microbatches whose rows it computes; None for all rows of a step of one microbatch.
        group: page group that the attention reads; None without attention.
        begins: whether the first segment embeds the tokens.
    """

    home: Home
    segments: tuple[SegmentPlan, ...]
    blocks: Blocks | None
    group: Homes | None
    begins: bool = False

    def shape(self, step: BatchShape, num_microbatches: int) -> BatchShape:
        """Return the shape of these rows, given the shape of the step."""
        if self.blocks is None or len(self.blocks) == num_microbatches:
            return step
        return BatchShape(((step.num_rows // num_microbatches * len(self.blocks), 1),), step.table_width)


@dataclass(frozen=True)
class ColumnCopy:
    """Blocks of hidden states that go from one device to another, or to another place on the same device.

    Attributes:
        blocks: number of blocks; None for all tokens of a step of one microbatch.
    """

    source: int
    source_block: int
    target: int
    target_block: int
    blocks: int | None


@dataclass(frozen=True)
class Transfer:
    """Hidden states that change their place between two runs of layers.

    Attributes:
        kind: `join` or `split`, by one collective program over `home`, or `copy`.
        home: the larger home of a `join` or `split`.
        lower: degree of the smaller homes of a `join` or `split`.
        copies: copies of a `copy`. All sources are read before any target is written.
    """

    kind: Literal["join", "split", "copy"]
    home: Home | None = None
    lower: int = 0
    copies: tuple[ColumnCopy, ...] = ()


Work = Compute | Transfer


def work_list(placement: Placement, microbatch: int | None, cutter: SegmentCutter) -> tuple[Work, ...]:
    """Return the work of a step, in order, up to the hidden states that the head reads.

    Args:
        microbatch: the microbatch of the step; None for a step of all microbatches, in blocks.
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
        """Where the hidden states are: homes, with the microbatches whose blocks they have."""

    def build(self) -> tuple[Work, ...]:
        placement = self._placement
        first = self._arranged(placement.runs[0].homes)
        begins = all(placement.head.contains(home) for home in first)
        if not begins:
            self._at = self._arranged((placement.head,) * placement.num_microbatches)
            self._compute(placement.head, (embedding_plan(),), None, begins=True)
        for run in placement.runs:
            self._move_to(self._arranged(run.homes))
            group = run.homes if run.module != "ffn" else None
            for home in self._at:
                segments = self._cutter.cut(run.layers, run.module, embeds=placement.head.contains(home))
                self._compute(home, segments, group, begins=begins and run is placement.runs[0])
        self._move_to(self._arranged((placement.head,) * placement.num_microbatches))
        return tuple(self._work)

    def _arranged(self, homes: Homes) -> dict[Home, Blocks]:
        if self._microbatch is not None:
            return {homes[self._microbatch]: (self._microbatch,)}
        return {home: tuple(m for m, other in enumerate(homes) if other == home) for home in sorted(set(homes))}

    def _compute(self, home: Home, segments: tuple[SegmentPlan, ...], group: Homes | None, *, begins: bool) -> None:
        blocks = self._at[home] if self._microbatch is None else None
        self._work.append(Compute(home, segments, blocks, group, begins))

    def _move_to(self, wanted: dict[Home, Blocks]) -> None:
        """Append the transfer that brings the hidden states to other homes, if one is needed."""
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
    """Return the programs of one item of a work list.

    For a `copy` these are two programs for each copy, in order: the read and the write.

    Args:
        step: shape of the step.
        extent_pages: pages of each extent of a layer on a rank, by home.
    """
    pool, width = plan.sub_meshes, plan.hidden_tokens
    if isinstance(work, Compute):
        group, at = pool.group(work.home.start, work.home.degree), work.shape(step, num_microbatches)
        return [plan.layers_spec(specs, group, segment, at, extent_pages[work.home]) for segment in work.segments]
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
    """Return the number of columns to copy for a step of one microbatch: few different numbers need few programs."""
    columns = 1
    while columns < num_tokens:
        columns *= _COPY_RATIO
    return min(columns, hidden_tokens)


def _collective(before: dict[Home, Blocks], after: dict[Home, Blocks]) -> Transfer | None:
    """Return the `join` or `split` that moves all blocks, if the smaller homes are the parts of the larger one."""
    for kind, parts, wholes in (("join", before, after), ("split", after, before)):
        ((whole, blocks), *others), lower = wholes.items(), next(iter(parts)).degree
        if others or not 2 <= len(parts) == len(blocks) or whole.degree != lower * len(parts):
            continue
        starts = range(whole.start, whole.start + whole.degree, lower)
        if parts == {Home(start, lower): (block,) for start, block in zip(starts, sorted(blocks), strict=True)}:
            return Transfer("join" if kind == "join" else "split", whole, lower)
    return None
