"""Models with experts change their degree and placement while requests run, and no token changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import ragged_prompts, tiny_model
from transform_cases import SHARED, Background, decoding, make, requests, tokens, wait_until_decoding

from amoeba_jax import LLM, SamplingParams

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(
    scope="module",
    params=["qwen3-moe-mixed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-moe", "gpt-oss"))],
)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(name: str, tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    with make(tiny_model(name, tmp_path_factory.mktemp("models")), compile_cache, **SHARED) as llm:
        yield llm


@pytest.mark.slow
def test_chain_of_degrees(llm: LLM):
    running, expected = decoding(llm, 4, requests(8, max_tokens=48))
    for tp in (4, 2, 4, 1):
        report = llm.transform(tp)
        assert report.extra_bytes <= llm._engine.cluster.memory_plan.staging_bytes
    assert tokens(running.result()) == expected
    check_idle(llm)


@pytest.mark.slow
def test_chain_with_replicated_layers_and_a_pause(name: str, tmp_path: Path, compile_cache: str):
    """An instance with replicas cannot merge, so layers replicate only before and after the chain of degrees.

    The first round compiles programs, so its requests may end before the last change.
    """
    replicas: dict[str, Any] = {"layers": range(1, 2), "device": 1}
    pause: dict[str, Any] = {"release_weights": False, "running": "pause"}
    with make(tiny_model(name, tmp_path), compile_cache, **SHARED | {"device_memory": "16MiB"}) as llm:
        staging = llm._engine.cluster.memory_plan.staging_bytes
        for _ in range(2):
            running, expected = decoding(llm, 4, requests(8, max_tokens=80))
            llm.replicate(**replicas)
            llm.evict(**replicas)
            for tp, how in ((4, {}), (2, pause), (4, {}), (1, {})):
                assert llm.transform(tp, **how).extra_bytes <= staging
            llm.replicate(**replicas)
            llm.evict(**replicas)
            unfinished = sum(view.running for view in llm.instances)
            assert tokens(running.result()) == expected
            assert all(request.metrics.num_preemptions == 0 for request in running.outputs)
        assert unfinished > 0, "the requests had ended before"
        check_idle(llm)


def test_paused_requests_go_on(llm: LLM):
    running, expected = decoding(llm, 4, requests(8, max_tokens=48))
    llm.transform(4, release_weights=False, running="pause")
    llm.transform(1)
    assert tokens(running.result()) == expected
    check_idle(llm)


def hidden_states(llm: LLM) -> list[bytes]:
    """Return the hidden states of all ranks of the only instance after its last step."""
    llm._engine.drain()
    (array,) = llm._engine.cluster.factory.hidden._arrays.values()
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]


def test_released_weights_come_back_unchanged(llm: LLM):
    cluster = llm._engine.cluster

    def stored() -> list[bytes]:
        specs = cluster.weights.specs.values()
        keys = [(spec.name, index) for spec in specs for index in range(spec.num_shards)]
        return [np.asarray(cluster.weights.shard(device, *key)).tobytes() for device in range(4) for key in keys]

    before = llm._dispatcher.call(stored).result()
    llm.transform(4)
    assert llm.instances[0].kv_total_pages > 4 * cluster.memory_plan.num_pages
    llm.generate(ragged_prompts(200)[:2], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    hidden = llm._dispatcher.call(hidden_states, llm).result()
    assert len(hidden) == 4
    assert set(hidden) == {hidden[0]}, "ranks would route tokens differently"
    llm.transform(1)
    assert llm._dispatcher.call(stored).result() == before


@pytest.mark.slow
def test_layers_with_experts_are_replicated_and_migrated(name: str, tmp_path: Path, compile_cache: str):
    directory = tiny_model(name, tmp_path)
    golden = np.load(GOLDEN / f"{name}.npz")
    placement = {"head": [0], "stages": [{"layers": [0, 2], "homes": [[0]]}]}
    with make(directory, compile_cache, num_devices=2, placement=placement) as llm:
        prompts = ragged_prompts(llm.dims.config.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        running = Background(llm, prompts, params)
        wait_until_decoding(llm, len(prompts))
        llm.replicate(range(1, 2), device=1)
        llm.evict(range(1, 2), device=1)
        llm.migrate(range(1, 2), device=1)
        outputs = running.result()
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert list(output.outputs[0].token_ids)[:12] == golden[f"tokens_{index}"][len(prompt) :].tolist()


@pytest.mark.slow
def test_attention_of_each_microbatch_beside_experts_of_the_group(name: str, tmp_path: Path, compile_cache: str):
    """The placement combines data-parallel attention with expert-parallel FFNs."""
    golden = np.load(GOLDEN / f"{name}.npz")
    homes = [[device] for device in range(2)]
    placement = {
        "head": [0],
        "stages": [
            {"layers": [0, 2], "module": "attention", "homes": homes},
            {"layers": [0, 2], "module": "ffn", "homes": [[0, 1]]},
        ],
    }
    settings = {"num_devices": 2, "max_tensor_parallel_size": 2, "placement": placement}
    with make(tiny_model(name, tmp_path), compile_cache, **settings) as llm:
        prompts = ragged_prompts(llm.dims.config.vocab_size)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert list(output.outputs[0].token_ids) == golden[f"tokens_{index}"][len(prompt) :].tolist()
