"""How a model is cut into segments."""

import pytest
from tiny_models import tiny_config

from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import plan_segments
from amoeba_jax.models.dims import ModelDims


def dims(num_layers: int) -> ModelDims:
    config = ModelConfig.from_hf(tiny_config("llama2") | {"num_hidden_layers": num_layers})
    return ModelDims(config, max_tp=1, page_size=16, dtype="float32")


def test_shallow_model_is_one_segment():
    (plan,) = plan_segments(dims(8), 8)
    assert (plan.shape.embedding, plan.shape.head, list(plan.layers)) == (True, True, list(range(8)))


@pytest.mark.parametrize(
    ("num_layers", "segment_layers", "runs"),
    [(30, 8, [6] * 5), (12, 8, [6, 6]), (64, 8, [8] * 8), (11, 4, [4, 4, 3]), (80, 8, [8] * 10), (5, 1, [1] * 5)],
)
def test_deep_model_is_equal_runs_between_embedding_and_head(num_layers: int, segment_layers: int, runs: list[int]):
    first, *middle, last = plan_segments(dims(num_layers), segment_layers)
    assert (first.shape.embedding, first.shape.head, first.shape.num_layers) == (True, False, 0)
    assert (last.shape.embedding, last.shape.head, last.shape.num_layers) == (False, True, 0)
    assert [plan.shape.num_layers for plan in middle] == runs
    assert [layer for plan in middle for layer in plan.layers] == list(range(num_layers))
