"""Devices count the loads of experts, and experts are dealt to ranks by measured loads."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compile_watch import CompileWatch
from serving_checks import check_idle
from tiny_models import ragged_prompts, tiny_config, tiny_model
from transform_cases import SHARED, make

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import ConfigError, RequestError
from amoeba_jax.expert_loads import deal, load_imbalance, read_order
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims
from serving.runtime.metrics import ServerMetrics
from serving.runtime.snapshot import take_snapshot
from sharding.placement import Home, Placement

pytestmark = pytest.mark.usefixtures("quick_compile")

SETTINGS: dict[str, Any] = {**SHARED, "prefix_caching": False}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("qwen3-moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with make(directory, compile_cache, **SETTINGS) as llm:
        yield llm


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(ragged_prompts(llm.dims.config.vocab_size), PARAMS)
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected_tokens(llm: LLM) -> int:
    """Return the number of token-expert pairs in a layer. The last token of an answer is never computed."""
    prompts = ragged_prompts(llm.dims.config.vocab_size)
    experts = llm.dims.config.experts
    assert experts is not None
    assert PARAMS.max_tokens is not None
    return experts.top_k * (sum(map(len, prompts)) + len(prompts) * (PARAMS.max_tokens - 1))


@pytest.mark.slow
def test_tokens_are_counted_through_changes_of_degree(llm: LLM, tmp_path: Path, directory: Path, compile_cache: str):
    before = llm.expert_loads().tokens
    expected = answers(llm)
    first = llm.expert_loads()
    assert (first.tokens - before).sum(axis=1).tolist() == [expected_tokens(llm)] * llm.dims.config.num_layers
    assert set(first.imbalance.values()) == {1.0}, "TP1 has one rank"
    llm.transform(4)
    assert answers(llm) == expected
    with CompileWatch() as watch:
        both = llm.expert_loads()
        assert not (llm.expert_loads().tokens - both.tokens).any()
    assert watch.programs == 0
    np.testing.assert_array_equal(both.tokens - first.tokens, first.tokens - before)
    (imbalance,) = both.imbalance.values()
    (view,) = llm.instances
    ranks = both.tokens.reshape(-1, 4, 2).sum(axis=2)  # 8 experts on 4 ranks
    assert imbalance == view.expert_load_imbalance == pytest.approx(ranks.max(axis=1).sum() / ranks.mean(axis=1).sum())
    assert imbalance > 1.05
    metrics = ServerMetrics()
    metrics.latest = take_snapshot(llm)
    assert metrics.registry.get_sample_value("amoeba:expert_load_imbalance", {"instance": str(view.id)}) == imbalance
    llm.transform(1)
    check_idle(llm)
    both.save(file := tmp_path / "loads.json")
    with make(directory, compile_cache, expert_loads=file, **SETTINGS) as dealt:
        assert dealt.dims.expert_order != llm.dims.expert_order
        assert answers(dealt) == expected
        dealt.transform(4)
        assert answers(dealt) == expected
        loads = dealt.expert_loads()
        np.testing.assert_array_equal(loads.tokens, both.tokens - before)
        assert 1 <= loads.imbalance[dealt.instances[0].id] < imbalance
        dealt.save(tmp_path / "saved")
    with make(tmp_path / "saved", compile_cache, num_devices=1, prefix_caching=False) as loaded:
        assert loaded.dims.expert_order == ()
        assert answers(loaded) == expected


@pytest.mark.slow
def test_tokens_of_an_ffn_at_other_devices_are_counted(directory: Path, compile_cache: str):
    """Padding of the microbatches does not count."""
    stage = {"layers": [0, 2]}
    stages = [stage | {"module": "attention", "homes": [[0], [1]]}, stage | {"module": "ffn", "homes": [[0, 1]]}]
    settings: dict[str, Any] = {"num_devices": 2, "max_tensor_parallel_size": 2, "prefix_caching": False}
    with make(directory, compile_cache, placement={"head": [0], "stages": stages}, **settings) as llm:
        answers(llm)
        assert llm.expert_loads().tokens.sum(axis=1).tolist() == [expected_tokens(llm)] * 2


@pytest.mark.slow
def test_dense_models_have_no_loads(tmp_path: Path, compile_cache: str):
    with make(tiny_model("llama2", tmp_path), compile_cache, num_devices=1, prefix_caching=False) as llm:
        assert llm.instances[0].expert_load_imbalance is None
        with pytest.raises(RequestError, match="has no experts"):
            llm.expert_loads()


# --- dealing ----------------------------------------------------------------------------------------------------


def largest(loads: np.ndarray, order: tuple[int, ...], shards: int) -> int:
    return int(loads[list(order)].reshape(shards, -1).sum(axis=1).max())


@pytest.mark.parametrize("seed", range(4))
def test_dealt_shards_are_nearly_as_equal_as_possible(seed: int):
    loads = np.random.default_rng(seed).integers(0, 100, 8)
    order = deal(loads, 2)
    assert sorted(order) == list(range(8))
    halves = [loads[list(half)].sum() for half in itertools.combinations(range(8), 4)]
    best = min(max(half, loads.sum() - half) for half in halves)
    assert largest(loads, order, 2) <= 7 / 6 * best


def test_shards_stay_equally_large():
    loads = np.array([1000, 0, 0, 0, 0, 0, 0, 0])
    assert sorted(deal(loads, 4)[:2]) == list(deal(loads, 4)[:2])
    assert sorted(deal(loads, 4)) == list(range(8))
    assert deal(np.ones(6, np.int64), 6) == (0, 1, 2, 3, 4, 5)


def test_imbalance_is_the_largest_over_the_mean_load_of_a_rank():
    dims = ModelDims(ModelConfig.from_hf(tiny_config("qwen3-moe")), 4, 16, "float32")
    layers = dims.config.num_layers
    first = np.array([[8, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])[:layers]
    totals = {0: first, 1: np.zeros_like(first)}
    # Shards have 2 experts. At TP2, rank 0 has shards 0 and 2, at TP4 each rank has one shard.
    for tp, ratio in ((1, 1.0), (2, (8 + 4) / (4 + 4)), (4, (8 + 2) / (2 + 2))):
        assert load_imbalance(dims, Placement.uniform(Home(0, tp), layers), totals) == pytest.approx(ratio)
    assert load_imbalance(dims, Placement.uniform(Home(0, 4), layers), {}) == 1.0
    mixed = ModelDims(ModelConfig.from_hf(tiny_config("qwen3-moe-mixed")), 4, 16, "float32")
    assert load_imbalance(mixed, Placement.uniform(Home(0, 4), 2), {0: np.ones((2, 6), int)}) == 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read: JSONDecodeError"),
        ("[]", "cannot be read: TypeError"),
        ({"loads": []}, "cannot be read: KeyError"),
        ({"expert_loads": 3}, "must have 2 lists .layers. of 8 numbers"),
        ({"expert_loads": [[1] * 8]}, "must have 2 lists"),
        ({"expert_loads": [[1] * 8, [1] * 7]}, "must have 2 lists"),
        ({"expert_loads": [[1] * 8, [1] * 7 + [-1]]}, "-1 must be an integer from 0"),
        ({"expert_loads": [[1] * 8, [1] * 7 + [0.5]]}, "0.5 must be an integer from 0"),
        ({"expert_loads": [[1] * 8, [1] * 7 + [1 << 53]]}, "9007199254740992 must be an integer"),
    ],
)
def test_bad_files_are_refused(content: Any, message: str, tmp_path: Path):
    (file := tmp_path / "loads.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read_order(str(file), ModelConfig.from_hf(tiny_config("qwen3-moe")), 4)


def test_files_need_a_model_with_experts_and_may_not_be_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="llama has no experts"):
        read_order("loads.json", ModelConfig.from_hf(tiny_config("llama2")), 1)
    with pytest.raises(ConfigError, match=r"nowhere\.json.*FileNotFoundError"):
        read_order(str(tmp_path / "nowhere.json"), ModelConfig.from_hf(tiny_config("qwen3-moe")), 1)
    monkeypatch.setattr("amoeba_jax.expert_loads.MAX_FILE_BYTES", 10)
    (file := tmp_path / "loads.json").write_text(json.dumps({"expert_loads": [[1] * 8] * 2}))
    with pytest.raises(ConfigError, match="the limit is 10"):
        read_order(str(file), ModelConfig.from_hf(tiny_config("qwen3-moe")), 1)


def test_experts_divided_inside_are_not_dealt(tmp_path: Path):
    (file := tmp_path / "loads.json").write_text(json.dumps({"expert_loads": [[5, 4, 3, 2, 1, 0]] * 2}))
    model = ModelConfig.from_hf(tiny_config("qwen3-moe-mixed"))
    assert read_order(str(file), model, 4) == ()
    assert read_order(str(file), model, 2)[0] == (0, 3, 4, 1, 2, 5)
