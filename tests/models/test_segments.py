"""Division of a model into segments."""

import pytest
from tiny_models import tiny_config

from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import head_plan, plan_segments
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.plan import segment_layers


def dims(num_layers: int) -> ModelDims:
    config = ModelConfig.from_hf(tiny_config("llama2") | {"num_hidden_layers": num_layers})
    return ModelDims(config, max_tp=1, page_size=16, dtype="float32")


@pytest.mark.parametrize(
    ("num_layers", "segment_layers", "runs"),
    [
        (8, 8, [8]),
        (2, 4, [2]),
        (30, 8, [6] * 5),
        (12, 8, [6, 6]),
        (64, 8, [8] * 8),
        (11, 4, [4, 4, 3]),
        (80, 8, [8] * 10),
        (5, 1, [1] * 5),
    ],
)
def test_model_is_equal_runs_of_layers(num_layers: int, segment_layers: int, runs: list[int]):
    segments = plan_segments(dims(num_layers), segment_layers)
    assert [len(plan.layers) for plan in segments] == runs
    assert [layer for plan in segments for layer in plan.layers] == list(range(num_layers))
    assert not any(plan.is_head for plan in segments)


def test_head_is_a_segment_without_layers():
    plan = head_plan(dims(8))
    assert plan.is_head
    assert list(plan.layers) == []
    assert plan not in plan_segments(dims(8), 8)


@pytest.mark.parametrize(
    ("platform", "num_layers", "runs"),
    [
        ("cpu", 30, [5] * 6),
        ("cpu", 48, [4] * 12),
        ("cpu", 32, [4] * 8),
        ("cpu", 12, [4] * 3),
        ("cpu", 5, [4, 1]),
        ("gpu", 30, [6] * 5),
        ("gpu", 5, [5]),
    ],
)
def test_default_runs_depend_on_platform_and_depth(platform: str, num_layers: int, runs: list[int]):
    """On CPU a small model has two runs, which change their layout in turn."""
    segments = plan_segments(dims(num_layers), segment_layers(platform, num_layers))
    assert [len(plan.layers) for plan in segments] == runs
