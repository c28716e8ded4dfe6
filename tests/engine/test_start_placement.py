"""A start placement changes no results. Each device holds only its pages and the weights of its modules."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_checks import check_idle
from tiny_models import tiny_config, write_model
from transform_cases import requests, tokens

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import ConfigError, LayoutError, MemoryBudgetError, RequestError
from amoeba_jax.outputs import RequestOutput
from sharding.placement import Placement

pytestmark = pytest.mark.usefixtures("quick_compile")

SETTINGS: dict[str, Any] = {
    "device_memory": "8MiB",
    "kv_cache_tokens": 768,
    "page_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 128,
    "segment_layers": 2,
    "progress": False,
}
NUM_LAYERS = 6


def stage(first: int, end: int, *homes: list[int], module: str = "layer") -> dict[str, Any]:
    return {"layers": [first, end], "homes": list(homes), "module": module}


PLACEMENTS: dict[str, dict[str, Any]] = {
    "spread over two devices": {"head": [0], "stages": [stage(0, 4, [0]), stage(4, 6, [1])]},
    "spread over three devices, in any order": {
        "head": [2],
        "stages": [stage(0, 1, [3]), stage(1, 4, [0]), stage(4, 6, [2])],
    },
    "spread over four devices": {
        "head": [1],
        "stages": [stage(0, 2, [1]), stage(2, 4, [3]), stage(4, 5, [2]), stage(5, 6, [0])],
    },
    "layers replicated": {"head": [0], "stages": [stage(0, 1, [0]), stage(1, 4, [0], [1]), stage(4, 6, [0])]},
    "layers replicated three times": {
        "head": [3],
        "stages": [stage(0, 2, [0], [1], [2]), stage(2, 4, [0], [1], [0]), stage(4, 6, [3])],
    },
    "attention and ffn apart": {
        "head": [0],
        "stages": [
            stage(0, 2, [0]),
            stage(2, 5, [0], module="attention"),
            stage(2, 5, [1], module="ffn"),
            stage(5, 6, [1]),
        ],
    },
    "parallel attention beside one ffn": {
        "head": [0, 1],
        "stages": [stage(0, 6, [0], [1], module="attention"), stage(0, 6, [0, 1], module="ffn")],
    },
    "homes of two devices": {"head": [0, 1], "stages": [stage(0, 3, [0, 1]), stage(3, 6, [2, 3])]},
    "embedding and head apart from all layers": {"head": [3], "stages": [stage(0, 6, [1])]},
}
OFTEN = ("parallel attention beside one ffn",)
ASKED = requests(4, max_tokens=16)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("qwen3") | {"num_hidden_layers": NUM_LAYERS}
    return write_model(config, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one_device(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with LLM(directory, compile_cache=compile_cache, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(one_device: LLM) -> list[list[tuple[int, ...]]]:
    return tokens(one_device.generate(*ASKED))


def placed(directory: Path, compile_cache: str, placement: Any, **changes: Any) -> LLM:
    settings = {**SETTINGS, "num_devices": 4, **changes}
    return LLM(directory, compile_cache=compile_cache, placement=placement, **settings)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in PLACEMENTS]
)
def test_tokens_logits_and_bytes(
    name: str, directory: Path, compile_cache: str, one_device: LLM, expected: list[list[tuple[int, ...]]]
):
    prompt = list(range(3, 40))
    with placed(directory, compile_cache, PLACEMENTS[name]) as llm:
        assert tokens(llm.generate(*ASKED)) == expected
        np.testing.assert_allclose(llm.logits(prompt, 20), one_device.logits(prompt, 20), atol=1e-4, rtol=0)
        check_bytes(llm, PLACEMENTS[name])
        check_idle(llm)


def check_bytes(llm: LLM, data: dict[str, Any]) -> None:
    """Check that every device holds exactly the weights of its modules, and nothing if it has no module."""
    placement = Placement.from_data(data, NUM_LAYERS, 4, 4)
    report, specs = llm.memory(), llm._engine.cluster.weights.specs
    for device in range(4):
        if device not in placement.devices:
            assert report.device_bytes(device) == 0
            continue
        weights = 0
        for spec in specs.values():
            if spec.layer is None:
                # Devices of an instance that can merge and split have the whole head.
                whole = placement.attention_degree is not None or llm.dims.config.tied_embeddings
                homes, whole = [placement.head], whole and spec.name == "head"
            else:
                modules = placement.attention if "attention" in spec.name else placement.ffn
                homes, whole = list(modules[spec.layer]), False
            (degree,) = {home.degree for home in homes if device in home.devices} or {0}
            if degree:
                share = 1 if whole or spec.placement == "replicated" else degree
                weights += spec.num_bytes(llm.dims.dtype) // share
        owners = report.by_owner(device)
        held = sum(size for owner, size in owners.items() if owner not in ("kv cache", "sampling", "hidden states"))
        assert held == weights


@pytest.mark.slow
def test_five_and_three_rows_of_replicated_layers(directory: Path, compile_cache: str, one_device: LLM):
    """Eight requests run at once. Five are in one microbatch after a request of the other microbatch has ended."""
    prompts = [list(range(3, 8 + n)) for n in range(9)]
    params = [SamplingParams(temperature=0, max_tokens=4 if n == 1 else 24, ignore_eos=True) for n in range(9)]
    before = tokens(one_device.generate(prompts, params))
    with placed(directory, compile_cache, PLACEMENTS["layers replicated"], max_num_seqs=8) as llm:
        assert tokens(llm.generate(prompts, params)) == before


def test_a_model_that_no_device_holds_is_spread(directory: Path, compile_cache: str, one_device: LLM):
    """Each device has room for three quarters of the weights."""
    report = one_device.memory()
    owners = report.by_owner(0)
    fixed = owners["sampling"] + owners["hidden states"]
    weights = sum(owners.values()) - owners["kv cache"] - fixed
    budget = report.reserved_bytes[0] + fixed + weights * 3 // 4
    with pytest.raises(MemoryBudgetError):
        LLM(directory, compile_cache=compile_cache, **{**SETTINGS, "device_memory": budget, "kv_cache_tokens": None})
    settings = {"device_memory": budget, "kv_cache_tokens": None, "max_tensor_parallel_size": 1}
    with placed(directory, compile_cache, "auto", **settings) as llm:
        used = [device for device in range(4) if llm.memory().device_bytes(device)]
        assert len(used) > 1
        assert used == list(range(len(used)))
        plans, pages = llm._engine.cluster.plan.device_plans, llm.instances[0].kv_total_pages
        assert pages == min(plan.num_pages for plan in plans.values())
        assert llm.max_model_len == min(SETTINGS["max_model_len"], pages * SETTINGS["page_size"])
        prompt = list(range(3, 20))
        np.testing.assert_allclose(llm.logits(prompt), one_device.logits(prompt), atol=1e-4, rtol=0)


def test_auto_takes_one_device_if_that_is_enough(directory: Path, compile_cache: str):
    with placed(directory, compile_cache, "auto") as llm:
        assert [bool(llm.memory().device_bytes(device)) for device in range(4)] == [True, False, False, False]


@pytest.mark.slow
def test_warmed_up_placement_compiles_nothing_more(
    directory: Path, compile_cache: str, expected: list[list[tuple[int, ...]]]
):
    with placed(directory, compile_cache, PLACEMENTS["layers replicated"], strict_compile=True) as llm:
        llm.warmup()
        assert tokens(llm.generate(*ASKED)) == expected
        assert llm.stats.late_programs == 0


def test_a_step_that_fails_loses_no_request(
    directory: Path, compile_cache: str, expected: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
):
    from amoeba_jax.instances.runner import Runner

    run, calls = Runner.run, []

    def failing(self: Runner, inputs: Any) -> Any:
        calls.append(inputs)
        if len(calls) == 5:
            raise RuntimeError("the device has failed")
        return run(self, inputs)

    with placed(directory, compile_cache, PLACEMENTS["layers replicated"]) as llm:
        monkeypatch.setattr(Runner, "run", failing)
        assert tokens(llm.generate(*ASKED)) == expected
        monkeypatch.undo()
        assert llm.stats.failed_steps == 1
        check_idle(llm)


def test_instances_with_a_placement_do_not_merge(directory: Path, compile_cache: str):
    with placed(directory, compile_cache, PLACEMENTS["spread over two devices"]) as llm:
        with pytest.raises(LayoutError, match="instance 0 has a placement of its own"):
            llm.transform(4)
        output: list[RequestOutput] = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2))
        assert len(output[0].outputs[0].token_ids) > 0


def test_placements_come_from_dicts_text_and_files(directory: Path, compile_cache: str, tmp_path: Path):
    data = PLACEMENTS["spread over two devices"]
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    for placement in (data, json.dumps(data), str(file)):
        with placed(directory, compile_cache, placement) as llm:
            assert [stage["homes"] for stage in llm.placement().to_dict()["stages"]] == [[[0]], [[1]]]
            with pytest.raises(RequestError, match=r"no instance 3: there are \[0\]"):
                llm.placement(3)


@pytest.mark.parametrize(
    ("placement", "changes", "error", "text"),
    [
        ("nowhere.json", {}, ConfigError, "neither auto nor JSON"),
        ("{", {}, ConfigError, "not valid JSON"),
        ("{}", {}, LayoutError, "lacks"),
        ({"head": [4], "stages": [stage(0, 6, [0])]}, {}, LayoutError, "devices 0 to 3"),
        ({"head": [0], "stages": [stage(0, 7, [0])]}, {}, LayoutError, "from 0 to 6"),
        ({"head": [0], "stages": [stage(0, 6, [0])]}, {"tensor_parallel_size": 2}, ConfigError, "exclude each other"),
        (3, {}, ConfigError, "must be a dict"),
        ("auto", {"device_memory": 1000}, MemoryBudgetError, "do not hold the model"),
        (
            {"head": [0], "stages": [stage(0, 6, [1])]},
            {"device_memory": 1000},
            MemoryBudgetError,
            "device 0 of the placement",
        ),
    ],
)
def test_bad_placements_are_refused(
    placement: Any, changes: dict[str, Any], error: type[Exception], text: str, directory: Path, compile_cache: str
):
    with pytest.raises(error, match=text):
        placed(directory, compile_cache, placement, **changes)


def test_requests_beyond_the_placement_are_refused(directory: Path, compile_cache: str):
    with placed(directory, compile_cache, PLACEMENTS["spread over two devices"]) as llm:
        limit = llm.max_model_len
        with pytest.raises(RequestError, match=str(limit)):
            llm.generate([3] * limit, SamplingParams(max_tokens=8))
