"""Sharing an instance does not change a request's tokens: preemption, cached prefixes, chunks, siblings."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import engine_of
from tiny_models import tiny_model

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import RequestError

pytestmark = pytest.mark.usefixtures("quick_compile")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def settings(compile_cache: str) -> dict:
    return {
        "page_size": 4,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "max_model_len": 80,
        "compile_cache": compile_cache,
        "progress": False,
    }


@pytest.fixture(scope="module")
def llm(directory: Path, settings: dict) -> Iterator[LLM]:
    with LLM(directory, device_memory="4MiB", **settings) as llm:
        yield llm


def prompts(count: int, low: int = 1, high: int = 40) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(0, 211, random.integers(low, high)).tolist() for _ in range(count)]


def tokens(outputs: list) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def smallest_memory(llm: LLM, num_pages: int) -> int:
    """Return a device budget that leaves `num_pages` pages for the KV cache."""
    plan = engine_of(llm).cluster.memory_plan
    fixed = plan.weight_bytes + plan.activation_bytes + plan.sampling_bytes + plan.hidden_bytes
    return fixed + num_pages * plan.page_bytes * llm.dims.config.num_layers


@pytest.mark.first_by_default
@pytest.mark.parametrize(
    ("prefix_caching", "params"),
    [
        pytest.param(False, GREEDY, id="False-greedy"),
        pytest.param(False, SEEDED, id="False-seeded", marks=pytest.mark.slow),
        pytest.param(True, GREEDY, id="True-greedy", marks=pytest.mark.slow),
        pytest.param(True, SEEDED, id="True-seeded"),
    ],
)
def test_preemption_changes_no_tokens(
    llm: LLM, directory: Path, settings: dict, params: SamplingParams, prefix_caching
):
    """The pages hold two prompts, but little more than one request with its output.

    So one of two running requests is always preempted.
    """
    params = dataclasses.replace(params, max_tokens=32)
    requests = prompts(8, 20, 28)
    expected = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in requests]
    memory = smallest_memory(llm, 17)
    with LLM(directory, device_memory=memory, prefix_caching=prefix_caching, **settings) as small:
        outputs = small.generate(requests, params)
        assert tokens(outputs) == expected
        assert small.stats.preemptions > 0
        assert sum(output.metrics.num_preemptions for output in outputs) == small.stats.preemptions
        (instance,) = small.instances
        assert (instance.kv_used_pages, instance.running, instance.waiting) == (0, 0, 0)


def test_cached_prefix_changes_no_tokens_and_saves_the_work(directory: Path, settings: dict):
    shared = prompts(1, 39, 40)[0]
    requests = [[*shared, token, token + 1] for token in range(5)]
    with LLM(directory, device_memory="4MiB", **settings) as llm:
        first = llm.generate(requests[:1], GREEDY)[0]
        before = llm.stats
        rest = llm.generate(requests[1:], GREEDY)
        after = llm.stats
        assert first.num_cached_tokens == 0
        assert [output.num_cached_tokens for output in rest] == [36] * 4
        assert after.prompt_tokens - before.prompt_tokens == 4 * (41 - 36)
        other_tenant = llm.generate(requests[:1], GREEDY, cache_salt="another")[0]
        assert other_tenant.num_cached_tokens == 0
        cached = tokens([first, *rest])
        assert tokens([other_tenant]) == cached[:1]
    with LLM(directory, device_memory="4MiB", prefix_caching=False, **settings) as llm:
        assert tokens(llm.generate(requests, GREEDY)) == cached
        assert llm.stats.cached_tokens == 0


@pytest.mark.parametrize("length", [8, 11])  # the prompt ends at the end of a page, or within a page
def test_samples_share_the_prompt_and_differ(llm: LLM, length: int):
    prompt = prompts(1, length, length + 1)[0]
    params = SamplingParams(n=3, temperature=1.2, seed=9, max_tokens=8, ignore_eos=True)
    before = llm.stats.prompt_tokens
    (output,) = llm.generate([prompt], params, cache_salt=f"of {length} tokens")
    # The prompt once, and its last token again for each sibling.
    assert llm.stats.prompt_tokens - before == length + 2
    assert [o.index for o in output.outputs] == [0, 1, 2]
    samples = [o.token_ids for o in output.outputs]
    assert len(set(samples)) == 3
    alone = [
        llm.generate([prompt], SamplingParams(temperature=1.2, seed=seed, max_tokens=8, ignore_eos=True))
        for seed in (9, 10, 11)
    ]
    assert [o[0].outputs[0].token_ids for o in alone] == samples


def test_prompt_logprobs_are_those_of_the_logits(llm: LLM):
    prompt = prompts(1, 37, 38)[0]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    (beside, _) = llm.generate([prompt, prompts(1)[0]], params)
    sequence = [*prompt, *output.outputs[0].token_ids]
    logits = llm.logits(sequence).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    given = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    np.testing.assert_allclose(given, expected[np.arange(36), prompt[1:]], atol=1e-4)
    assert beside.prompt_logprobs is not None
    for index, (token, entry) in enumerate(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)):
        assert entry[token].rank == 1
        assert len(entry) == 2
        np.testing.assert_allclose(entry[token].logprob, expected[36 + index, token], atol=1e-4)


def test_lower_priority_values_are_served_first(llm: LLM):
    """Only four requests run at once. Among waiting requests, the urgent requests start first."""
    requests = prompts(12, 5, 10)
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, priority=i % 2) for i in range(12)]
    outputs = llm.generate(requests, params)
    urgent = [o.metrics.queue_s for o in outputs[::2]]
    others = [o.metrics.queue_s for o in outputs[1::2]]
    assert max(urgent) <= min(others)


def test_cancelled_request_returns_what_it_has(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    stream = llm.stream([1, 2, 3], params, request_id="mine")
    next(stream)
    with pytest.raises(RequestError, match="'mine' is taken"):
        llm.stream([4], params, request_id="mine")
    assert llm.cancel("mine")
    *_, last = stream
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert not llm.cancel("mine")
    assert all(instance.running == 0 and instance.kv_used_pages == 0 for instance in llm.instances)


def test_async_requests_run_together(llm: LLM):
    requests = prompts(6)
    expected = tokens(llm.generate(requests, GREEDY))

    async def together() -> list:
        return await asyncio.gather(*(llm.agenerate(prompt, GREEDY) for prompt in requests))

    assert tokens(asyncio.run(together())) == expected


def test_cancelled_task_ends_its_request(llm: LLM):
    async def start_and_cancel() -> None:
        arrived = asyncio.Event()

        async def consume() -> None:
            async for _ in llm.astream([1, 2, 3], SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)):
                arrived.set()

        task = asyncio.create_task(consume())
        await asyncio.wait_for(arrived.wait(), 120)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(start_and_cancel())
    assert all(instance.running == 0 and instance.kv_used_pages == 0 for instance in llm.instances)
