"""Work lists of steps, run on plain lists: every module computes the rows of its microbatches once."""

import hypothesis.strategies as st
from hypothesis import given
from placement_cases import D0, D1, D2, D3, Q, placements
from tiny_models import tiny_config

from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import plan_segments
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.segments import SegmentCutter
from amoeba_jax.programs.work import Compute, Transfer, Work, work_list
from sharding.placement import Homes, Placement

Block = tuple[str, ...]
"""Names of the modules that have computed a block of hidden states, in order."""


def cutter(num_layers: int, segment_layers: int) -> SegmentCutter:
    config = ModelConfig.from_hf(tiny_config("qwen3") | {"num_hidden_layers": num_layers})
    dims = ModelDims(config, max_tp=4, page_size=4, dtype="float32")
    return SegmentCutter(dims, plan_segments(dims, segment_layers))


def carry_out(work: tuple[Work, ...], placement: Placement, microbatch: int | None) -> dict[int, list[Block]]:
    """Run a work list on lists of blocks. Return the blocks of each device."""
    several = microbatch is None and placement.num_microbatches > 1
    count = placement.num_microbatches if several else 1
    buffers: dict[int, list[Block]] = {device: [()] * count for device in placement.devices}
    for item in work:
        if isinstance(item, Compute):
            blocks = range(count) if item.blocks is None else range(len(item.blocks))
            for segment in item.segments:
                name = "embedding" if segment.module == "embedding" else segment.module
                for place in blocks:
                    number = (item.blocks or (microbatch or 0,))[place]
                    for device in item.home.devices:
                        before = buffers[device][place]
                        if item.begins and segment is item.segments[0]:
                            assert segment.embeds
                            before = (f"rows {number}",)
                        layers = [f"{name} {layer}" for layer in segment.layers]
                        buffers[device][place] = (*before, *layers)
        else:
            transfer(item, buffers)
    return buffers


def transfer(item: Transfer, buffers: dict[int, list[Block]]) -> None:
    if item.home is not None:
        parts = [
            list(item.home.devices)[first : first + item.lower] for first in range(0, item.home.degree, item.lower)
        ]
        if item.kind == "join":
            joined = [buffers[part[0]][0] for part in parts]
            for device in item.home.devices:
                buffers[device][: len(joined)] = joined
        else:
            for number, part in enumerate(parts):
                for device in part:
                    buffers[device][0] = buffers[device][number]
        return
    taken = [[buffers[copy.source][copy.source_block + n] for n in range(copy.blocks or 1)] for copy in item.copies]
    for copy, blocks in zip(item.copies, taken, strict=True):
        for n, block in enumerate(blocks):
            buffers[copy.target][copy.target_block + n] = block


def expected_block(placement: Placement, number: int) -> Block:
    names = [f"rows {number}"]
    for layer, (attention, ffn) in enumerate(zip(placement.attention, placement.ffn, strict=True)):
        names += [f"layer {layer}"] if attention == ffn else [f"attention {layer}", f"ffn {layer}"]
    return tuple(names)


@given(placements(), st.integers(1, 4), st.data())
def test_every_module_computes_the_rows_of_its_microbatches_once(
    placement: Placement, segment_layers: int, data: st.DataObject
):
    microbatch = data.draw(st.sampled_from([None, *range(placement.num_microbatches)]))
    work = work_list(placement, microbatch, cutter(placement.num_layers, segment_layers))
    buffers = carry_out(work, placement, microbatch)
    several = microbatch is None and placement.num_microbatches > 1
    numbers = range(placement.num_microbatches) if several else [microbatch or 0]
    for device in placement.head.devices:
        assert buffers[device][: len(numbers)] == [expected_block(placement, number) for number in numbers]


@given(placements(), st.data())
def test_computation_happens_at_the_homes_that_the_placement_names(placement: Placement, data: st.DataObject):
    microbatch = data.draw(st.sampled_from([None, *range(placement.num_microbatches)]))
    for item in work_list(placement, microbatch, cutter(placement.num_layers, 2)):
        if not isinstance(item, Compute) or item.segments[0].module == "embedding":
            continue
        numbers = item.blocks if item.blocks is not None else (microbatch or 0,)
        for segment in item.segments:
            for layer in segment.layers:
                modules = placement.ffn if segment.module == "ffn" else placement.attention
                assert all(modules[layer][number] == item.home for number in numbers)


def kinds(placement: Placement, microbatch: int | None = None) -> list[str]:
    work = work_list(placement, microbatch, cutter(placement.num_layers, 2))
    return [item.kind if isinstance(item, Transfer) else f"{item.home}" for item in work]


def test_merging_instances_join_by_one_collective_program():
    four: Homes = (D0, D1, D2, D3)
    merging = Placement.uniform(Q, 4, 4).with_modules(range(2), "layer", four)
    assert kinds(merging) == [*map(str, four), "join", "TP4[0-3]"]
    splitting = Placement.uniform(Q, 4, 4).with_modules(range(2, 4), "layer", four)
    assert kinds(splitting) == ["TP4[0-3]", "split", *map(str, four), "join"]
    assert kinds(merging, 2) == ["TP1[2]", "copy", "TP4[0-3]"]


def test_transfers_grow_with_runs_and_not_with_layers():
    def count(last: int) -> int:
        placement = Placement.uniform(D0, 20, 2).with_modules(range(5, last), "layer", (D0, D1))
        return kinds(placement).count("copy")

    assert count(6) == count(15) == 2


def test_devices_without_the_embedding_get_its_output():
    work = work_list(Placement.uniform(D1, 2).with_head(D0), None, cutter(2, 2))
    assert [item.segments[0].module for item in work if isinstance(item, Compute)] == ["embedding", "layer"]
    assert not any(segment.embeds for item in work[1:] if isinstance(item, Compute) for segment in item.segments)
