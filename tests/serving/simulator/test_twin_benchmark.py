"""Mean of two calibrations in `benchmarks/twin.py`."""

import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from serving.simulator.calibration import Calibration

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

ONE = Calibration(
    model="m", num_devices=2, max_num_seqs=2, max_num_batched_tokens=64, page_size=16, max_model_len=128, num_layers=2,
    layers_per_step=1, capacity_tokens={1: 64}, max_requests={1: 2}, decode_s={1: {1: 2.0}}, prompt_s={1: {16: 2.0}},
    prompts_s={}, few_rows=1, latency_s=2.0, context_s={1: 2.0}, crowding={1: 2.0}, prompt_crowding={1: 2.0},
    up_layer_s=2.0, down_layer_s=2.0, page_layer_s=2.0,
)  # fmt: skip


def doubled(value: object) -> object:
    if isinstance(value, dict):
        return {key: doubled(item) for key, item in value.items()}
    return 2 * value if isinstance(value, float) else value


def test_the_mean_has_all_measured_times():
    """The test checks every float of the calibration, so that a new measurement is not left out."""
    from twin import mean

    two = Calibration(**{item.name: doubled(getattr(ONE, item.name)) for item in fields(Calibration)})
    found, expected = mean(ONE, two), 3.0
    for item in fields(Calibration):
        value, one = getattr(found, item.name), getattr(ONE, item.name)
        if isinstance(one, float):
            assert value == expected, item.name
    assert found.decode_s == {1: {1: 3.0}}
    assert found.capacity_tokens == ONE.capacity_tokens


def test_calibrations_of_different_engines_have_no_mean():
    from twin import mean

    with pytest.raises(ValueError, match="different engines: page_size"):
        mean(ONE, replace(ONE, page_size=32))
