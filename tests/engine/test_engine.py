"""Requests share instances without touching each other's results."""

import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from harness import engine_of
from tiny_models import tiny_config, tiny_model, write_model

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.steps import MAX_FAILURES, MAX_FAILURES_IN_A_ROW
from amoeba_jax.errors import EngineClosedError, RequestError, RequestFailedError
from amoeba_jax.instances.runner import Runner
from amoeba_jax.programs.step_program import StepKey

pytestmark = pytest.mark.usefixtures("quick_compile")

SETTINGS: dict[str, Any] = {
    "num_devices": 2,
    "device_memory": "2MiB",
    "page_size": 8,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "progress": False,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    directory = write_model(one_layer("qwen3"), tmp_path_factory.mktemp("models") / "one")
    with LLM(directory, compile_cache=compile_cache, **SETTINGS) as llm:
        yield llm


def one_layer(name: str) -> dict[str, Any]:
    """Return the config.json of a tiny model of one layer. Its programs compile in half the time."""
    return tiny_config(name) | {"num_hidden_layers": 1}


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(0, 211, random.integers(1, 40)).tolist() for _ in range(count)]


def tokens(outputs: list) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.first_by_default
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        pytest.param(
            SamplingParams(temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=11, max_tokens=9, ignore_eos=True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["greedy", "seeded"],
)
def test_tokens_do_not_depend_on_batch_instance_or_degree(llm: LLM, params: SamplingParams):
    """More requests than fit at once. Neighbors, instances and degrees differ from single runs."""
    requests = prompts(11)
    llm.set_layout(1)
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in requests]
    assert tokens(llm.generate(requests, params)) == alone
    llm.set_layout(2)
    assert tokens(llm.generate(requests[::-1], params))[::-1] == alone
    llm.set_layout(1)


def test_unseeded_requests_differ_and_seeds_repeat(llm: LLM):
    free = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    assert len(set(tokens(llm.generate([[1, 2, 3]] * 4, free)))) > 1
    seeded = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, seed=5)
    assert len(set(tokens(llm.generate([[1, 2, 3]] * 4, seeded)))) == 1


def test_all_pages_are_free_when_idle(llm: LLM):
    llm.generate(prompts(9), SamplingParams(temperature=0, max_tokens=5))
    for instance in llm.instances:
        assert (instance.kv_used_pages, instance.running, instance.waiting) == (0, 0, 0)


def test_stream_grows_token_by_token_and_ends_as_generate(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = list(llm.stream([4, 5, 6], params))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5, 6]
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert outputs[-1].outputs == llm.generate([[4, 5, 6]], params)[0].outputs


def test_leaving_a_stream_frees_its_pages(llm: LLM):
    for output in llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)):
        if len(output.outputs[0].token_ids) == 3:
            break
    del output
    assert all(instance.kv_used_pages == 0 and instance.running == 0 for instance in llm.instances)


def test_stop_tokens_end_a_request(llm: LLM):
    free = llm.generate([[9, 8, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0]
    stop = free.token_ids[3]
    ended = llm.generate([[9, 8, 7]], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(stop,)))
    expected = free.token_ids[: free.token_ids.index(stop) + 1]
    assert ended[0].outputs[0].token_ids == expected
    assert ended[0].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_models_own_end_needs_no_tokenizer(llm: LLM, file: str, tmp_path: Path, compile_cache: str):
    free = llm.generate([[9, 8, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0]
    end = free.token_ids[3]
    directory = write_model(one_layer("qwen3"), tmp_path / "one")
    config = one_layer("qwen3") if file == "config.json" else {}
    (directory / file).write_text(json.dumps(config | {"eos_token_id": [end, -1, 10**6]}))
    with LLM(directory, compile_cache=compile_cache, **SETTINGS) as ending:
        assert ending.tokenizer is None
        assert ending.eos_token_ids == {end}
        output = ending.generate([[9, 8, 7]], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0]
    assert output.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_metrics_are_in_order(llm: LLM):
    output = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0]
    metrics = output.metrics
    times = (metrics.queue_s, metrics.ttft_s, metrics.tpot_s)
    queue_s, ttft_s, tpot_s = (time for time in times if time is not None)
    assert 0 <= queue_s <= ttft_s
    assert tpot_s > 0


def test_layout_does_not_change_under_running_requests(llm: LLM):
    stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    with pytest.raises(RequestError, match="1 running"):
        llm.set_layout(2)
    stream.close()
    llm.set_layout(2)
    llm.set_layout(1)


def test_request_checked_in_one_layout_is_not_stuck_in_another(tmp_path: Path, compile_cache: str):
    """The layout may change after the caller checks a request and before the engine takes it."""
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 1, "device_memory": "700KiB", "progress": False}
    directory = tiny_model("llama2", tmp_path)
    with LLM(directory, num_devices=2, tensor_parallel_size=2, compile_cache=compile_cache, **settings) as llm:
        stream = llm.stream([1] * engine_of(llm).capacity_tokens(1), SamplingParams(max_tokens=1))
        llm.set_layout(1)
        with pytest.raises(RequestError, match="KV cache of a TP1 instance"):
            next(stream)
        assert all(instance.waiting == 0 for instance in llm.instances)
        llm.set_layout(2)


def test_abandoned_stream_may_be_collected_in_any_thread(llm: LLM):
    """The finalizer must not wait for the dispatcher, because the dispatcher itself may run it."""
    holder: dict = {}
    stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    holder["self"], holder["stream"] = holder, stream
    del stream, holder
    llm._dispatcher.call(gc.collect).result(timeout=60)
    assert all(instance.running == 0 and instance.kv_used_pages == 0 for instance in llm.instances)


def test_stream_that_never_starts_takes_nothing(llm: LLM):
    stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=100))
    assert all(instance.running == 0 and instance.waiting == 0 for instance in llm.instances)
    del stream


def test_device_that_fails_every_step_ends_requests_with_its_cause_and_then_the_engine(
    tmp_path: Path, compile_cache: str, monkeypatch: pytest.MonkeyPatch
):
    directory = tiny_model("llama2", tmp_path)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    llm = LLM(directory, device_memory="16MiB", compile_cache=compile_cache, progress=False)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = llm.generate([[1, 2, 3]], params)[0].outputs

    def broken(*_: object) -> None:
        raise OSError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "launch", broken)  # a fault that no bad request can cause
        with pytest.raises(RequestFailedError, match="the device is gone") as failure:
            llm.generate([[1, 2, 3]], params)
        assert isinstance(failure.value.__cause__, OSError)
    assert llm.generate([[1, 2, 3]], params)[0].outputs == expected
    assert llm.stats.failed_steps == MAX_FAILURES
    monkeypatch.setattr(Runner, "launch", broken)
    for _ in range(MAX_FAILURES_IN_A_ROW // MAX_FAILURES):
        with pytest.raises(RequestFailedError):
            llm.generate([[1, 2, 3]], params)
    with pytest.raises(EngineClosedError, match="the device is gone"):
        llm.generate([[1, 2, 3]], params)
    with pytest.raises(EngineClosedError):
        llm.generate([[1]])
    llm.close()
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) == before


def test_requests_may_be_checked_against_an_instance_that_ends_meanwhile(tmp_path: Path, compile_cache: str):
    """A client's thread checks its requests while the dispatcher retires instances."""
    with LLM(tiny_model("llama2", tmp_path), device_memory="16MiB", compile_cache=compile_cache, progress=False) as llm:
        engine = engine_of(llm)
        (instance,) = engine.instances
        capacity = engine.changes.capacity_to_come(instance)
        assert capacity == (instance.capacity_tokens, 1)
        llm.close()
        assert engine.changes.capacity_to_come(instance) == capacity


def test_dropped_engine_frees_its_memory(tmp_path: Path, compile_cache: str):
    directory = tiny_model("llama2", tmp_path)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    llm = LLM(directory, device_memory="16MiB", compile_cache=compile_cache, progress=False)
    llm.memory()
    assert llm.instances
    del llm
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) == before


def test_several_threads_may_call(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    requests = prompts(6)
    expected = tokens(llm.generate(requests, params))
    results: dict[int, tuple[int, ...]] = {}

    def work(index: int) -> None:
        results[index] = llm.generate([requests[index]], params)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index] for index in range(len(requests))] == expected


@pytest.mark.slow
def test_segments_give_the_same_logits(tmp_path: Path, compile_cache: str):
    directory = tiny_model("mistral-window", tmp_path)
    results = []
    for segment_layers in (32, 1):
        with LLM(
            directory,
            device_memory="16MiB",
            segment_layers=segment_layers,
            compile_cache=compile_cache,
            progress=False,
        ) as llm:
            results.append(llm.logits(list(range(40)), decode_from=30))
            steps = [executable.spec.key for executable in engine_of(llm).cluster.executables]
    np.testing.assert_allclose(results[0], results[1], atol=1e-6)
    # One program for both layers and one for the head, each for prefill and decode.
    assert len(steps) == 2 * len({key.batch for key in steps if isinstance(key, StepKey)})
