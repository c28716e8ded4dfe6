"""Transformations with scarce memory: refusals, and preemption only on devices that lack pages."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_config, write_model
from transform_cases import SETTINGS, Background, after_each_switch, make, tokens, wait_until_decoding

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.admission import Admission
from amoeba_jax.errors import RequestError, TransformError
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.request import Request
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.relayout import Relayout

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

SCARCE: dict[str, Any] = {"max_model_len": None, "max_num_seqs": 2, "kv_cache_tokens": 15 * SETTINGS["page_size"]}
ALL = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    directory = write_model(tiny_config("llama2") | {"num_hidden_layers": 6}, tmp_path_factory.mktemp("models") / "six")
    with make(directory, compile_cache, **SCARCE) as llm:
        yield llm


@pytest.fixture
def scarce(llm: LLM) -> Iterator[LLM]:
    """Provide 4 x TP1 with little room. Check afterwards that the engine works and that no page is lost."""
    yield llm
    llm.transform(1)
    check_idle(llm)


def greedy(max_tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **settings)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 200, length).tolist()


def capacity(llm: LLM, degree: int, released: int | None = None) -> int:
    return llm._engine.cluster.plan.capacity_tokens(degree, released or degree)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.slow
def test_request_during_a_split_that_is_too_long_for_what_comes(scarce: LLM, monkeypatch: pytest.MonkeyPatch):
    """The request is refused while the instance still has all four devices."""
    too_long, fits = capacity(scarce, 1) - 3, capacity(scarce, 1) - 4
    scarce.transform(4)
    running = Background(scarce, [prompt(5)], greedy(45))
    wait_until_decoding(scarce, 1)
    refused: list[Exception] = []

    def check(transition: Relayout) -> None:
        assert transition.instance.tp == 4
        scarce._engine.check_request(fits, 4)
        try:
            scarce._engine.check_request(too_long, 4)
        except RequestError as error:
            refused.append(error)

    with monkeypatch.context() as patch:
        after_each_switch(patch, check)
        scarce.transform(1)
    assert len(refused) == 6
    assert "TP1 instance holds" in str(refused[0])
    running.result()


@pytest.mark.slow
def test_waiting_request_that_no_instance_would_hold(scarce: LLM):
    """After the split all instances would be TP1, which is too small."""
    scarce.transform(2, devices=[0, 1])
    running = Background(scarce, [prompt(5, seed) for seed in range(8)], greedy(45))
    wait_until_decoding(scarce, 8)
    waiting = Background(scarce, [prompt(capacity(scarce, 1))], greedy(4))
    wait_until(lambda: scarce.instances[0].waiting > 0)
    with pytest.raises(RequestError, match=r"which waits, needs \d+ tokens, and a TP1 instance would hold \d+"):
        scarce.transform(1, devices=[0, 1])
    assert len(waiting.result()[0].outputs[0].token_ids) == 4
    running.result()


@pytest.mark.slow
def test_waiting_request_and_weights_that_were_not_released(scarce: LLM):
    """The split releases no weights, so the new instances are smaller than usual."""
    scarce.transform(4, release_weights=False)
    running = Background(scarce, [prompt(5, seed) for seed in range(8)], greedy(45))
    wait_until_decoding(scarce, 8)
    length = (capacity(scarce, 2, 1) + capacity(scarce, 2)) // 2
    assert capacity(scarce, 2, 1) < length + 4 < capacity(scarce, 4, 1)
    waiting = Background(scarce, [prompt(length)], greedy(4))
    wait_until(lambda: scarce.instances[0].waiting > 0)
    with pytest.raises(RequestError, match=f"would hold {capacity(scarce, 2, 1)}"):
        scarce.transform(2)
    assert len(waiting.result()[0].outputs[0].token_ids) == 4
    running.result()


@pytest.mark.slow
def test_request_for_an_instance_that_never_came(scarce: LLM, monkeypatch: pytest.MonkeyPatch):
    """The request arrives just before a merge that fails. Only this request ends with an error."""
    running = Background(scarce, [prompt(5)], greedy(45))
    wait_until_decoding(scarce, 1)
    late: list[Request] = []

    def fails(transition: Relayout) -> Any:
        late.append(scarce._registry.make(prompt(capacity(scarce, 1)), greedy(4), lambda _: None, None, None))
        scarce._engine.submit([late[0].sequences[0]])
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Relayout, "_plan_moves", fails)
        with pytest.raises(TransformError, match="injected"):
            scarce.transform(4)
    (sequence,) = late[0].sequences
    wait_until(lambda: sequence.finished)
    scarce._registry.end(late)
    assert isinstance(sequence.error, RequestError)
    assert "no instance holds more than 60 any more" in str(sequence.error)
    assert len(running.result()[0].outputs[0].token_ids) == 45


@pytest.mark.parametrize("degree", [1, 4], ids=["without", "merge"])
def test_lack_of_pages_on_one_device_is_nobody_elses(scarce: LLM, monkeypatch: pytest.MonkeyPatch, degree: int):
    """Two requests fill one device. Only the later request is preempted."""
    size = capacity(scarce, 1)
    lengths = [size // 2, size // 2 - 8, 4, 4, 4, 4]
    homes = [0, 0, 1, 2, 3, 1]
    params = greedy(16)
    alone = [tokens(scarce.generate([prompt(length, i)], params))[0] for i, length in enumerate(lengths)]
    handles = [
        scarce._registry.make(prompt(length, i), params, lambda _: None, None, None) for i, length in enumerate(lengths)
    ]
    sequences = [handle.sequences[0] for handle in handles]
    choose = Admission.choose

    def chosen(admission: Admission, sequence: Sequence) -> Any:
        instances = scarce._engine.instances
        if sequence.num_preemptions or len(instances) < 4:
            return choose(admission, sequence)
        instance = instances[homes[sequences.index(sequence)]]
        return instance, instance.lane

    def serve() -> int:
        engine = scarce._engine
        engine.submit(sequences)
        while any(not sequence.output for sequence in sequences):
            engine.advance()
            engine.drain()
        report = engine.transform(TransformOptions(degree, ALL))
        engine.end_transformations()
        return sum(group.recomputed for group in report.result().groups)

    monkeypatch.setattr(Admission, "choose", chosen)
    recomputed = scarce._dispatcher.call(serve).result(TIMEOUT_S)
    wait_until(lambda: all(sequence.finished for sequence in sequences))
    scarce._registry.end(handles)
    assert [sequence.num_preemptions for sequence in sequences] == [0, 1, 0, 0, 0, 0]
    assert recomputed == (degree > 1)
    assert [[tuple(sequence.output)] for sequence in sequences] == alone


@pytest.mark.slow
def test_siblings_begin_when_the_prompt_ends_on_the_way(scarce: LLM):
    """Only the last token of the leader's prompt is left when the merge begins."""
    params = SamplingParams(temperature=1, seed=1, max_tokens=27, ignore_eos=True, n=3)
    length = 2 * SETTINGS["max_num_batched_tokens"] + 1
    request = scarce._registry.make(prompt(length), params, lambda _: None, None, None)
    leader, *siblings = request.sequences

    def serve() -> None:
        engine = scarce._engine
        engine.submit([leader])
        engine.advance()
        engine.advance()
        assert leader.num_uncomputed_tokens == 1
        assert not leader.output
        assert len(leader.siblings) == 2
        engine.transform(TransformOptions(4, ALL))
        engine.end_transformations()

    scarce._dispatcher.call(serve).result(TIMEOUT_S)
    wait_until(lambda: all(sequence.finished for sequence in request.sequences))
    scarce._registry.end([request])
    for sibling in siblings:
        assert sibling.started_at is not None
        assert leader.finished_at is not None
        assert sibling.started_at < leader.finished_at
        assert len(sibling.output) == 27
