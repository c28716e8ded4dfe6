"""A request of higher priority preempts only requests whose pages help it."""

from collections.abc import Iterator

import numpy as np
import pytest
from harness import registry_of
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_config, write_model
from transform_cases import Background, wait_until_decoding

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import RequestError

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

PAGE_SIZE, NUM_PAGES = 4, 16
TP1_TOKENS = PAGE_SIZE * NUM_PAGES


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with one instance on devices 0 and 1, and one instance each on devices 2 and 3."""
    directory = write_model(tiny_config("llama2") | {"num_hidden_layers": 1}, tmp_path_factory.mktemp("models") / "one")
    with LLM(
        directory,
        num_devices=4,
        tensor_parallel_size=1,
        max_tensor_parallel_size=2,
        device_memory="16MiB",
        kv_cache_tokens=TP1_TOKENS,
        page_size=PAGE_SIZE,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        prefix_caching=False,
        compile_cache=compile_cache,
        progress=False,
    ) as llm:
        llm.transform(2, [0, 1], release_weights=False)
        assert [view.devices for view in llm.instances] == [(0, 1), (2,), (3,)]
        yield llm


def low(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, priority=5)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 211, length).tolist()


def capacities(llm: LLM) -> tuple[int, int]:
    """Return the capacity in tokens of the large instance and of a small one."""
    large, small, _ = (view.kv_total_pages * PAGE_SIZE for view in llm.instances)
    return large, small


@pytest.mark.slow
def test_instances_that_are_too_small_keep_their_requests(llm: LLM):
    """The last requests in order run on small instances. Even empty, these cannot hold the urgent request."""
    large, small = capacities(llm)
    assert large > small + 16
    first = Background(llm, [prompt(small + 8, 1)], low(large - small - 8))  # fits the large instance alone
    wait_until_decoding(llm, 1)
    others = Background(llm, [prompt(8, seed) for seed in (2, 3)], low(small - 8))
    wait_until_decoding(llm, 3)
    urgent = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate([prompt(small + 4, 4)], urgent)
    assert [output.metrics.num_preemptions for output in first.result()] == [1]
    assert [output.metrics.num_preemptions for output in others.result()] == [0, 0]
    check_idle(llm)


def test_nobody_is_preempted_where_that_makes_too_little_room(llm: LLM):
    """On the only instance that is large enough, most pages belong to a request of higher priority."""
    large, small = capacities(llm)
    important = Background(
        llm, [prompt(small + 8, 1)], SamplingParams(temperature=0, max_tokens=large - small - 30, ignore_eos=True)
    )
    wait_until_decoding(llm, 1)
    others = Background(llm, [prompt(4, seed) for seed in (5, 6)], low(small - 8))
    wait_until_decoding(llm, 3)
    llm.generate([prompt(small + 4, 4)], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, priority=1))
    assert [output.metrics.num_preemptions for output in important.result()] == [0]
    assert [output.metrics.num_preemptions for output in others.result()] == [0, 0]
    check_idle(llm)


def test_default_ids_and_those_of_callers_never_meet(llm: LLM):
    """A caller may choose the number that the next request would have had."""
    (output,) = llm.generate([prompt(4)], low(1))
    number = int(output.request_id.split("-")[0])
    streams = [llm.stream(prompt(4), low(4), request_id=str(number + ahead)) for ahead in range(1, 8)]
    assert len(llm.generate([prompt(4)] * 4, low(1))) == 4
    for stream in streams:
        assert list(stream)
    check_idle(llm)


def test_one_of_many_that_became_too_long_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Instances split after a request is checked and before it is submitted."""
    _, small = capacities(llm)
    submit = registry_of(llm).submit

    def split_first(requests: list) -> None:
        monkeypatch.setattr(registry_of(llm), "submit", submit)
        llm.transform(1, [0, 1])
        submit(requests)

    monkeypatch.setattr(registry_of(llm), "submit", split_first)
    try:
        long, short = llm.generate([prompt(small + 8), prompt(8)], low(4))
        assert long.error is not None
        assert "over the limit" in long.error
        assert len(short.outputs[0].token_ids) == 4
        monkeypatch.setattr(registry_of(llm), "submit", submit)
        with pytest.raises(RequestError, match="over the limit"):
            llm.generate([prompt(small + 8)], low(4))
    finally:
        llm.transform(2, [0, 1], release_weights=False)
    check_idle(llm)
