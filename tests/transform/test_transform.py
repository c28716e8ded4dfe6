"""Instances merge and split while requests run, and every token equals an undisturbed run."""

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from serving_checks import TIMEOUT_S, check_idle, forget_prefixes
from tiny_models import tiny_config, tiny_model, write_model
from transform_cases import (
    EXPERTS_FIRST,
    SETTINGS,
    SHARED,
    Background,
    decoding,
    kv_of,
    make,
    requests,
    tokens,
    wait_until_decoding,
)

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import LayoutError, RequestError
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.runner import Runner
from amoeba_jax.instances.step import PendingStep, StepPlan
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.relayout_plan import check_options

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]


@pytest.fixture(scope="module", params=EXPERTS_FIRST)
def model_name(request: pytest.FixtureRequest) -> str:
    return request.param


CHAINS = [[4, 1], *(pytest.param(chain, marks=pytest.mark.slow) for chain in ([4, 2, 1], [2, 4, 2, 1]))]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(map(str, chain)))
def test_tokens_do_not_depend_on_transformations(idle: LLM, chain: list[int]):
    prompts, params = requests(20)
    expected = tokens(idle.generate(prompts, params))
    forget_prefixes(idle)
    running = Background(idle, prompts, params)
    wait_until_decoding(idle, 8)
    reports = [idle.transform(tp) for tp in chain]
    assert tokens(running.result()) == expected
    assert sum(report.tokens for report in reports) > 0, "the requests had ended before"
    assert {view.tensor_parallel_size for view in idle.instances} == {chain[-1]}
    assert all(request.metrics.num_preemptions == 0 for request in running.outputs)


@pytest.mark.parametrize(
    ("layers_per_step", "variant", "release_weights"),
    [
        (1, "in_place", True),
        (2, "in_place_overlapped", True),
        (1, "in_place_overlapped", False),
        (100, "in_place", False),
    ],
)
def test_every_way_gives_the_same_tokens(idle: LLM, layers_per_step: int, variant: str, release_weights: bool):
    running, expected = decoding(idle, 4, requests(8, max_tokens=32))
    how = {"variant": variant, "release_weights": release_weights, "layers_per_step": layers_per_step}
    up = idle.transform(4, **how)
    capacity = idle.instances[0].kv_total_pages
    kept = idle._dispatcher.call(views_of_weights, idle).result()
    idle.transform(1, **how)
    assert tokens(running.result()) == expected
    assert not any(view.is_deleted() for view in kept), "views of buffers that have become KV cache"
    plan = idle._engine.cluster.memory_plan
    assert (capacity > 4 * plan.num_pages) == release_weights
    layers = idle.dims.config.num_layers
    assert [len(group.layers) for group in up.groups] == [layers]
    assert up.steps == -(-layers // layers_per_step)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        pytest.param("qwen2", 2, marks=pytest.mark.slow),
        *(
            pytest.param(name, 4, marks=pytest.mark.slow)
            for name in ("qwen2", "qwen3", "mistral-window", "llama3-scaled-rope", "smollm2")
        ),
    ],
)
def test_other_models(name: str, num_devices: int, tmp_path: Path, compile_cache: str):
    """The models have indivisible head counts, query and key norms, biases or sliding windows."""
    with make(tiny_model(name, tmp_path), compile_cache, num_devices=num_devices) as llm:
        running, expected = decoding(llm, 4, requests(8, max_tokens=32))
        for tp in (4, 2, 1) if num_devices == 4 else (2, 1):
            llm.transform(tp)
        assert tokens(running.result()) == expected
        check_idle(llm)


@pytest.mark.slow
def test_attention_weights_too(directory: Path, compile_cache: str):
    with make(directory, compile_cache, transform_attention=True) as llm:
        running, expected = decoding(llm, 4, requests(8, max_tokens=32))
        for tp in (2, 4, 1):
            llm.transform(tp)
        assert tokens(running.result()) == expected
        ffn_only = [c for c in llm._engine.cluster.weights.released(0, 4) if ".attention." not in c.spec.name]
        assert len(llm._engine.cluster.weights.released(0, 4)) == 2 * len(ffn_only)
        check_idle(llm)


@pytest.mark.slow
def test_two_groups_of_eight_devices(directory: Path, compile_cache: str):
    """One group changes while the other serves. Then both change at once."""
    with make(directory, compile_cache, num_devices=8) as llm:
        running, expected = decoding(llm, 8, requests(24))
        llm.transform(4, devices=[4, 5, 6, 7])
        assert [view.tensor_parallel_size for view in llm.instances] == [1, 1, 1, 1, 4]
        llm.transform(2, devices=[0, 1])
        assert [view.devices for view in llm.instances] == [(0, 1), (2,), (3,), (4, 5, 6, 7)]
        llm.transform(4)
        assert [view.tensor_parallel_size for view in llm.instances] == [4, 4]
        llm.transform(1)
        assert tokens(running.result()) == expected
        check_idle(llm)


def test_kv_is_the_same_after_a_round_trip(idle: LLM):
    """Keys and values of earlier tokens stay equal byte by byte."""
    prompts, _ = requests(6)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    names = [f"kv-{index}" for index in range(len(prompts))]
    running = Background(idle, prompts, params, request_ids=names)
    wait_until_decoding(idle, len(prompts))
    before = kv_of(idle)
    idle.transform(4)
    merged = kv_of(idle)
    idle.transform(2)
    idle.transform(1)
    after = kv_of(idle)
    assert set(before) == set(merged) == set(after) == set(names)
    for name, layers in before.items():
        for then, meanwhile, now in zip(layers, merged[name], after[name], strict=True):
            assert len(now) > len(then), "it went on"
            np.testing.assert_array_equal(meanwhile[: len(then)], then)
            np.testing.assert_array_equal(now[: len(then)], then)
    running.result()


def test_kv_of_tokens_that_come_on_the_way(tmp_path: Path, compile_cache: str):
    """Pages that sequences get between two switches move with the layers that switch later.

    The cache after a merge and after a split is compared with the same tokens computed as a prompt.
    """
    directory = write_model(tiny_config("llama2") | {"num_hidden_layers": 6}, tmp_path)
    with make(directory, compile_cache, **SHARED | {"device_memory": "16MiB"}) as llm:
        prompts, _ = requests(6)
        params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
        running = Background(llm, prompts, params, request_ids=list(map(str, range(6))))
        wait_until_decoding(llm, len(prompts))
        found, pages = [], [sum(view.kv_used_pages for view in llm.instances)]
        for degree in (4, 1):
            assert llm.transform(degree).steps == 6
            found.append(kv_of(llm))
            pages.append(sum(view.kv_used_pages for view in llm.instances))
        assert pages[0] < pages[2], "there were none"
        outputs = running.result()
        for index, prompt in enumerate(prompts):
            length = len(found[1][str(index)][0])
            forget_prefixes(llm)
            again = [*prompt, *outputs[index].outputs[0].token_ids][:length]
            rest = SamplingParams(temperature=0, max_tokens=SETTINGS["max_model_len"] - length, ignore_eos=True)
            reference = Background(llm, [again], rest, request_ids=["again"])
            wait_until_decoding(llm, 1)
            expected = kv_of(llm)["again"]
            llm.cancel("again")
            reference.result()
            for kv in found:
                for layer, values in zip(expected, kv[str(index)], strict=True):
                    np.testing.assert_allclose(values, layer[: len(values)], atol=1e-4)


@pytest.mark.parametrize("running", [pytest.param(1, marks=pytest.mark.slow), 3], ids=lambda count: f"{count}-a-device")
def test_steps_on_the_way_have_as_few_rows_as_those_before(idle: LLM, monkeypatch: pytest.MonkeyPatch, running: int):
    """Each instance adds its decodes, rounded up to a power of two. Steps with prompts have 8 rows."""
    rows = {1: 1, 3: 4}[running]
    assert idle._engine.instances[0].buckets.mixed_rows == (8,)
    shapes = []
    launch = Runner.launch

    def watched(runner: Runner, plan: StepPlan, lanes: list[Lane]) -> PendingStep:
        if len(lanes) > 1:
            shapes.append(plan.shape.groups)
        return launch(runner, plan, lanes)

    monkeypatch.setattr(Runner, "launch", watched)
    prompts = np.random.default_rng(0).integers(3, 200, (4 * running, 5)).tolist()
    load = Background(idle, prompts, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    wait_until_decoding(idle, len(prompts))
    for degree in (4, 1):
        idle.transform(degree)
    load.result()
    assert set(shapes) == {((4 * rows, 1),)}


@pytest.mark.slow
def test_longer_than_one_device_holds(directory: Path, compile_cache: str):
    """A prompt four times as long as TP1 can hold is served by a merged instance, while short requests run."""
    scarce = {"max_model_len": None, "max_num_seqs": 2, "kv_cache_tokens": 15 * SETTINGS["page_size"]}
    with make(directory, compile_cache, **scarce) as llm:
        at_tp1 = llm.instances[0].kv_total_pages * 4
        long = np.random.default_rng(0).integers(3, 200, 4 * at_tp1).tolist()
        one = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        with pytest.raises(RequestError, match="TP1 instance holds"):
            llm.generate([long], one)
        prompts, params = [[5, 6, 7], [8, 9]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        expected = tokens(llm.generate(prompts, params))
        running = Background(llm, prompts, params)
        wait_until_decoding(llm, 2)
        llm.transform(4)
        assert len(llm.generate([long], one)[0].outputs[0].token_ids) == 4
        llm.transform(1)
        assert tokens(running.result()) == expected
        check_idle(llm)


def views_of_weights(llm: LLM) -> list[jax.Array]:
    groups = llm._engine.cluster.weights._views._parameters.values()
    return [view for names in groups for places in names.values() for view in places.values()]


# Refusals


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tensor_parallel_size": 3}, LayoutError, "tensor_parallel_size=3"),
        ({"tensor_parallel_size": 4, "devices": [0, 1]}, LayoutError, r"devices=\[0, 1\]"),
        ({"tensor_parallel_size": 2, "devices": [1, 2]}, LayoutError, r"devices=\[1, 2\]"),
        ({"tensor_parallel_size": 2, "devices": [0, 9]}, LayoutError, r"\[0, 9\].*4 devices"),
        ({"tensor_parallel_size": 2, "devices": []}, LayoutError, r"devices=\[\]"),
        ({"tensor_parallel_size": 2, "variant": "magic"}, RequestError, "magic.*in_place"),
        ({"tensor_parallel_size": 2, "variant": "restart"}, RequestError, "one of in_place_overlapped, in_place$"),
        ({"tensor_parallel_size": 2, "layers_per_step": 0}, RequestError, "layers_per_step=0"),
    ],
)
def test_what_cannot_be(idle: LLM, arguments: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        idle.transform(**arguments)
    assert [view.tensor_parallel_size for view in idle.instances] == [1] * 4


def test_degree_that_is_there_already(idle: LLM):
    report = idle.transform(1)
    assert report.groups == ()
    assert "to TP1" in str(report)


def test_instances_are_not_cut_in_two(idle: LLM):
    idle.transform(4)
    with pytest.raises(LayoutError, match="cut instance"):
        idle.transform(1, devices=[0, 1])
    assert [view.tensor_parallel_size for view in idle.instances] == [4]


def test_devices_of_another_call_are_refused(idle: LLM):
    """This error also comes between the transitions of the other call, and before the error about cut instances."""
    cluster, other = idle._engine.cluster, TransformOptions(4, (0, 1, 2, 3))
    for devices in ((0, 1), (0, 1, 2, 3)):
        check_options(TransformOptions(2, devices), cluster, [])
        with pytest.raises(RequestError, match=r"devices \[0, 1, 2, 3\] are being transformed"):
            check_options(TransformOptions(2, devices), cluster, [other])


def test_split_that_does_not_fit_is_refused(directory: Path, compile_cache: str):
    """A request that may outgrow one device goes on at TP4. The split succeeds after the request has ended."""
    scarce = {"max_model_len": None, "max_num_seqs": 2, "kv_cache_tokens": 15 * SETTINGS["page_size"]}
    with make(directory, compile_cache, **scarce) as llm:
        at_tp1 = llm.instances[0].kv_total_pages * 4
        llm.transform(4)
        prompt = np.random.default_rng(0).integers(3, 200, at_tp1).tolist()
        running = Background(llm, [prompt], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        wait_until_decoding(llm, 1)
        with pytest.raises(RequestError, match=f"may grow to {at_tp1 + 60} tokens"):
            llm.transform(1)
        assert len(running.result()[0].outputs[0].token_ids) == 60
        llm.transform(1)
        check_idle(llm)


@pytest.mark.slow
def test_one_at_a_time(idle: LLM):
    """A second call for the same devices is refused. A call for other devices is not."""
    prompts, params = requests(8)
    running = Background(idle, prompts, params)
    wait_until_decoding(idle, 4)
    outcomes: list[Any] = []

    def transform(devices: list[int]) -> None:
        try:
            outcomes.append(idle.transform(2, devices=devices))
        except RequestError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=transform, args=(devices,)) for devices in ([0, 1], [0, 1], [2, 3])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    refused = [outcome for outcome in outcomes if isinstance(outcome, RequestError)]
    assert len(outcomes) == 3
    assert all("being transformed" in str(error) for error in refused)
    assert [view.tensor_parallel_size for view in idle.instances] == [2, 2]
    running.result()


# Memory budget


def test_budget_that_is_exceeded_refuses(idle: LLM):
    """The budget has no room for temporaries. The change is refused, and the requests go on."""
    running, expected = decoding(idle, 3, requests(6))
    ledger = idle._engine.cluster.ledgers[2]
    ledger.reserve("test", ledger.free_bytes)
    needed, ledger.reserved["staging"] = ledger.reserved["staging"], 0
    ledger.reserve("test", ledger.free_bytes + ledger.reserved["test"])
    try:
        with pytest.raises(Exception, match="staging"):
            idle.transform(4)
    finally:
        del ledger.reserved["test"]
        ledger.reserved["staging"] = needed
    assert [view.tensor_parallel_size for view in idle.instances] == [1] * 4
    assert tokens(running.result()) == expected
