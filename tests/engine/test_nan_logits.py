"""A request whose logits are not numbers fails alone. Later requests find none of its values."""

import asyncio
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from harness import engine_of, in_dispatcher
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import poison, tiny_model

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import NotANumberError
from amoeba_jax.outputs import RequestOutput

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

POISON = 7
"""Token with a NaN embedding."""
CACHE = 128
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={POISON: -100})
KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    "drawn": SamplingParams(temperature=1, top_p=0.9, top_k=20, seed=3, max_tokens=12, ignore_eos=True),
    "penalized": SamplingParams(temperature=1, repetition_penalty=1.2, seed=3, max_tokens=12, logprobs=2),
}
GOOD = [[5, 6, 8, 9, 10, 11], [20, 21, 22, 23, 24, 25, 26, 27, 28]]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["TP1", "TP2"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with one instance."""
    with LLM(
        poison(tiny_model("llama2", tmp_path_factory.mktemp("models")), POISON),
        num_devices=request.param,
        tensor_parallel_size=request.param,
        device_memory="8MiB",
        kv_cache_tokens=CACHE,
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        progress=False,
        compile_cache=compile_cache,
    ) as llm:
        yield llm


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """Yield the engine. It has no requests and no used pages before and after the test."""
    check_idle(llm)
    yield llm
    check_idle(llm)


def tokens(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


def has_nan(llm: LLM) -> bool:
    """Return whether the KV cache contains a NaN."""

    def look() -> bool:
        kv = [extent for instance in engine_of(llm).instances for extent in instance.site.extents()]
        return any(bool(jnp.isnan(extent).any()) for extent in kv)

    return in_dispatcher(llm, look)


@pytest.mark.first_by_default
@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("bad", [[POISON], [3, POISON, 4], [*range(40, 80), POISON]], ids=["1", "3", "41"])
def test_fails_alone_among_others(idle: LLM, params: SamplingParams, bad: list[int]):
    expected = [tokens(idle.generate(prompt, params)[0]) for prompt in GOOD]
    before = idle.stats.nan_logits
    first, failed, last = idle.generate([GOOD[0], bad, GOOD[1]], params)
    assert [tokens(first), tokens(last)] == expected
    assert failed.outputs == ()
    assert failed.error is not None
    assert "not numbers" in failed.error
    assert idle.stats.nan_logits == before + 1


def test_alone_it_raises(idle: LLM):
    with pytest.raises(NotANumberError, match="'mine' after 3 tokens"):
        idle.generate([3, POISON, 4], GREEDY, request_ids=["mine"])
    with pytest.raises(NotANumberError):
        next(idle.stream([POISON], GREEDY))

    async def ask() -> None:
        await idle.agenerate([POISON], GREEDY)

    with pytest.raises(NotANumberError):
        asyncio.run(ask())


def test_in_the_midst_of_its_output(idle: LLM):
    """The poisoned token is generated. The next token is not."""
    only_poison = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, allowed_token_ids=[POISON])
    stream = idle.stream([3, 4], only_poison)
    assert tokens(next(stream)) == (POISON,)
    with pytest.raises(NotANumberError, match="after 3 tokens"):
        next(stream)


def test_all_samples_of_a_request_end_with_one(idle: LLM):
    drawn = SamplingParams(temperature=1, n=3, seed=1, max_tokens=60, ignore_eos=True)
    with pytest.raises(NotANumberError):
        idle.generate([3, POISON], drawn)
    # At least one sample generates the token sooner or later. Others may not.
    often = SamplingParams(temperature=1, n=3, seed=1, max_tokens=60, ignore_eos=True, logit_bias={POISON: 5})
    with pytest.raises(NotANumberError):
        idle.generate([3, 4], often)


def test_log_probabilities_of_a_prompt_are_numbers_or_none(idle: LLM):
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    expected = idle.generate(GOOD[0], params)[0]
    good, bad = idle.generate([GOOD[0], [3, POISON, 4, 5]], params)
    assert good.prompt_logprobs == expected.prompt_logprobs
    assert bad.error is not None


def test_pages_serve_others_afterwards(idle: LLM):
    """The failed request used every page of the cache and left NaNs there."""
    prompts = [[*range(100 + 10 * index, 110 + 10 * index)] for index in range(4)]
    expected = [tokens(output) for output in idle.generate(prompts, GREEDY)]
    check_idle(idle)
    longest = SamplingParams(temperature=0, max_tokens=4)
    with pytest.raises(NotANumberError):
        idle.generate([POISON] * (CACHE - 4), longest)
    assert has_nan(idle)
    assert [tokens(output) for output in idle.generate(prompts, GREEDY)] == expected
    # Prompts have one token, so the rest of each page contains values of the failed request.
    alone = [tokens(idle.generate([token], GREEDY)[0]) for token in (3, 4)]
    assert [tokens(output) for output in idle.generate([[3], [4]], GREEDY)] == alone


def test_damaged_pages_are_not_found_again(idle: LLM):
    """As after a device fault, the cached pages of a prompt become NaN, and one request reads them."""
    prompt = [*range(30, 50)]
    expected = tokens(idle.generate(prompt, GREEDY)[0])

    def damage() -> None:
        for instance in engine_of(idle).instances:
            for layer in instance.site.kv:
                layer[:] = [jnp.full_like(extent, np.nan) for extent in layer]

    in_dispatcher(idle, damage)
    with pytest.raises(NotANumberError):
        idle.generate([*prompt, 51], GREEDY)
    found = idle.stats.cached_tokens
    assert tokens(idle.generate(prompt, GREEDY)[0]) == expected
    assert idle.stats.cached_tokens == found
