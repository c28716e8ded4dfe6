"""Order in which requests are served if not all fit."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from serving_checks import TIMEOUT_S, alone, check_idle
from tiny_models import tiny_config, write_model

from amoeba_jax import LLM, RequestOutput, SamplingParams

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

NUM_SLOTS, NUM_PAGES, PAGE_SIZE = 4, 18, 4
CONTEXT = 64
ATTEMPTS = 20
"""Attempts to make a request arrive while others run. On a busy machine it may arrive too late."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with pages for hardly more than one sequence of the full context.

    Prefix caching is off. It does not change the order, but makes the lengths of runs harder to predict.
    """
    directory = write_model(tiny_config("llama2") | {"num_hidden_layers": 1}, tmp_path_factory.mktemp("models") / "one")
    settings = {
        "page_size": PAGE_SIZE,
        "max_num_batched_tokens": 16,
        "max_num_seqs": NUM_SLOTS,
        "max_model_len": CONTEXT,
        "prefix_caching": False,
        "compile_cache": compile_cache,
        "progress": False,
    }
    with LLM(directory, device_memory="16MiB", kv_cache_tokens=NUM_PAGES * PAGE_SIZE, **settings) as llm:
        yield llm


def greedy(max_tokens: int, priority: int = 0) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, priority=priority)


def random_prompts(count: int, low: int, high: int) -> list[list[int]]:
    random = np.random.default_rng(8)
    return [random.integers(0, 211, random.integers(low, high)).tolist() for _ in range(count)]


def started(output: RequestOutput) -> float:
    assert output.metrics.queue_s is not None
    return output.metrics.arrival + output.metrics.queue_s


def first_token(output: RequestOutput) -> float:
    assert output.metrics.ttft_s is not None
    return output.metrics.arrival + output.metrics.ttft_s


def finished(output: RequestOutput) -> float:
    assert output.metrics.e2e_s is not None
    return output.metrics.arrival + output.metrics.e2e_s


def test_requests_of_one_priority_start_in_the_order_of_their_arrival(llm: LLM):
    """There are twenty times as many requests as slots, of all lengths, with preemption."""
    random = np.random.default_rng(4)
    prompts = random_prompts(80, 1, 44)
    params = [greedy(int(n)) for n in random.integers(1, 20, len(prompts))]
    before = llm.stats.preemptions
    outputs = llm.generate(prompts, params)
    assert llm.stats.preemptions > before
    starts = [started(output) for output in outputs]
    assert starts == sorted(starts)


def test_few_later_requests_finish_before_an_earlier_one_has_its_first_token(llm: LLM):
    prompts = random_prompts(80, 1, 44)
    outputs = llm.generate(prompts, [greedy(1 + index % 7) for index in range(len(prompts))])
    for index, output in enumerate(outputs):
        overtaken_by = sum(finished(later) < first_token(output) for later in outputs[index + 1 :])
        assert overtaken_by < 3 * NUM_SLOTS, index


def test_long_prompt_starts_in_its_turn_among_short_ones(llm: LLM):
    """It needs nearly all pages. Later requests wait for it instead of taking free pages."""
    prompts = random_prompts(60, 2, 8)
    prompts[20] = random_prompts(1, 60, 61)[0]
    outputs = llm.generate(prompts, greedy(4))
    assert len(outputs[20].outputs[0].token_ids) == 4
    assert max(started(output) for output in outputs[:20]) <= started(outputs[20])
    assert started(outputs[20]) <= min(started(output) for output in outputs[21:])


def test_long_prompt_is_served_while_short_ones_keep_coming(llm: LLM):
    done = threading.Event()
    served: list[int] = []

    def keep_coming() -> None:
        while not done.is_set():
            served.append(len(llm.generate(random_prompts(2 * NUM_SLOTS, 2, 8), greedy(4))))

    threads = [threading.Thread(target=keep_coming, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        while len(served) < len(threads):
            done.wait(0.001)
        (output,) = llm.generate(random_prompts(1, 60, 61), greedy(4))
    finally:
        done.set()
    for thread in threads:
        thread.join(TIMEOUT_S / 2)
        assert not thread.is_alive()
    assert len(output.outputs[0].token_ids) == 4
    check_idle(llm)


def test_low_priority_ends_once_the_high_priority_load_has(llm: LLM):
    """The load preempts it. Afterwards it runs to its end without another preemption."""
    (prompt,) = random_prompts(1, 20, 21)
    expected = alone(llm, prompt, greedy(40))
    for _ in range(ATTEMPTS):
        low = llm.stream(prompt, greedy(40, priority=1))
        next(low)
        llm.generate(random_prompts(24, 20, 30), greedy(6))
        after_load = llm.stats.preemptions
        *_, last = low
        assert llm.stats.preemptions == after_load
        assert last.outputs == expected
        check_idle(llm)
        if last.metrics.num_preemptions:
            break
    else:
        pytest.fail("the load never came while it ran")


def test_high_priority_takes_the_slot_of_the_last_low_one(llm: LLM):
    for _ in range(ATTEMPTS):
        streams = [llm.stream(prompt, greedy(14, priority=5)) for prompt in random_prompts(NUM_SLOTS, 2, 3)]
        for stream in streams:
            next(stream)
        (high,) = llm.generate([[1, 2]], greedy(2, priority=-1))
        assert high.metrics.num_preemptions == 0
        low = [list(stream)[-1] for stream in streams]
        assert [len(output.outputs[0].token_ids) for output in low] == [14] * NUM_SLOTS
        preempted = [output.metrics.num_preemptions for output in low]
        if any(preempted):
            assert preempted == [0, 0, 0, 1]
            break
    else:
        pytest.fail("it never came while they ran")


def test_sequences_that_cannot_grow_together_take_turns_and_all_end(llm: LLM):
    """Each needs nearly all pages in the end. The oldest always advances, so a page costs at most one preemption."""
    prompts = random_prompts(6, 4, 5)
    before = llm.stats
    outputs = llm.generate(prompts, greedy(60))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [60] * 6
    preemptions = llm.stats.preemptions - before.preemptions
    assert 0 < preemptions <= 6 * CONTEXT // PAGE_SIZE
    ends = [finished(output) for output in outputs]
    assert ends == sorted(ends)
    assert outputs[0].metrics.num_preemptions == 0
