"""Requests with all kinds of settings in one batch, with preemption: outputs equal each request alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_checks import alone, check_idle

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.outputs import CompletionOutput

pytestmark = pytest.mark.usefixtures("quick_compile")

MAX_TOKENS = 30
Outputs = dict[str, tuple[CompletionOutput, ...]]
STORIES = [
    "Once upon a time, there was a little girl named Lily.",
    "Tom and Sam went to the park to play with a big red ball.",
    "The cat saw a bird in the tree and",
    "One day, a dog",
]


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, **settings)


def seeded(seed: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=MAX_TOKENS, **settings)


PARAMS = {
    "greedy": greedy(),
    "seeded": seeded(1),
    "stop string": greedy(stop=["the", "was a"]),
    "stop string of the output": seeded(2, stop=["every day"], include_stop_str_in_output=True),
    "stop string after min_tokens": greedy(stop=["a"], min_tokens=20),
    "min_tokens": greedy(stop_token_ids=[261, 269, 426], min_tokens=12),
    "bad_words": greedy(bad_words=["the", "little girl", "play", "a big"]),
    "bad_words, seeded": seeded(3, bad_words=["was playing", "Max", "to"]),
    "logit_bias": greedy(logit_bias={300: 4.0, 310: 100.0, 261: -100.0}),
    "logit_bias, seeded": seeded(4, logit_bias={300: 3.0, 400: 3.5}),
    "allowed_token_ids": greedy(allowed_token_ids=range(300, 360)),
    "allowed_token_ids, seeded": seeded(5, allowed_token_ids=range(260, 420), min_tokens=5),
    "frequency_penalty": greedy(frequency_penalty=1.5),
    "presence_penalty": seeded(6, presence_penalty=1.0, top_k=20),
    "repetition_penalty": greedy(repetition_penalty=1.4),
    "all penalties": seeded(7, frequency_penalty=-0.5, presence_penalty=0.7, repetition_penalty=1.2, min_p=0.05),
    "logprobs": greedy(logprobs=3),
    "logprobs and penalties": seeded(8, logprobs=0, frequency_penalty=2.0, presence_penalty=2.0),
    "prompt_logprobs": greedy(prompt_logprobs=2),
    "several": seeded(9, n=3, frequency_penalty=0.5),
    "top_p": seeded(10, top_p=0.5),
}


@pytest.fixture(scope="module")
def settings(compile_cache: str) -> dict[str, Any]:
    return {
        "page_size": 4,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "max_model_len": 80,
        "device_memory": "16MiB",
        "compile_cache": compile_cache,
        "progress": False,
    }


@pytest.fixture(scope="module")
def directory(shared_data: Path) -> Path:
    return shared_data / "models" / "stories260K"


@pytest.fixture(scope="module")
def prompts() -> dict[str, str]:
    return {name: STORIES[index % len(STORIES)] for index, name in enumerate(PARAMS)}


@pytest.fixture(scope="module")
def expected(directory: Path, settings: dict[str, Any], prompts: dict[str, str]) -> Outputs:
    """Return the outputs of each request alone, with enough memory."""
    with LLM(directory, **settings) as llm:
        outputs = {name: alone(llm, prompts[name], params) for name, params in PARAMS.items()}
        assert llm.stats.preemptions == 0
        return outputs


@pytest.fixture(scope="module")
def small(directory: Path, settings: dict[str, Any]) -> Iterator[LLM]:
    """Provide an engine with pages for one and a half requests."""
    scarce: dict[str, Any] = {**settings, "kv_cache_tokens": 24 * settings["page_size"]}
    with LLM(directory, **scarce) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, pytest.param(-1, marks=pytest.mark.slow)], ids=["in order", "reversed"])
def test_one_batch_of_all_gives_what_each_gives_alone(
    small: LLM, prompts: dict[str, str], expected: Outputs, order: int
):
    """Later requests are preempted, so each order preempts different requests."""
    names = list(PARAMS)[::order]
    outputs = small.generate([prompts[name] for name in names], [PARAMS[name] for name in names])
    preempted = [name for name, output in zip(names, outputs, strict=True) if output.metrics.num_preemptions]
    assert len(preempted) > len(names) // 3
    for name, output in zip(names, outputs, strict=True):
        for mine, others in zip(output.outputs, expected[name], strict=True):
            assert (mine.text, mine.token_ids) == (others.text, others.token_ids), name
            assert (mine.finish_reason, mine.stop_reason) == (others.finish_reason, others.stop_reason), name
            assert_same_logprobs(mine, others)
    check_idle(small)


def assert_same_logprobs(mine: CompletionOutput, others: CompletionOutput) -> None:
    assert (mine.logprobs is None) == (others.logprobs is None)
    for one, other in zip(mine.logprobs or (), others.logprobs or (), strict=True):
        assert list(one) == list(other)
        for token, value in one.items():
            assert value.rank == other[token].rank
            assert value.logprob == pytest.approx(other[token].logprob, abs=1e-4)


@pytest.mark.slow
def test_every_setting_changes_its_request(
    directory: Path,
    settings: dict[str, Any],
    prompts: dict[str, str],
    expected: Outputs,
):
    """Otherwise, equal outputs would prove little."""
    unchanged = {"greedy", "seeded", "logprobs", "prompt_logprobs"}
    with LLM(directory, **settings) as llm:
        for name, params in PARAMS.items():
            plain = SamplingParams(n=params.n, temperature=params.temperature, seed=params.seed, max_tokens=MAX_TOKENS)
            tokens = [output.token_ids for output in alone(llm, prompts[name], plain)]
            assert (tokens == [output.token_ids for output in expected[name]]) == (name in unchanged), name
    assert len(expected["stop string after min_tokens"][0].token_ids) > 20
    assert len(expected["min_tokens"][0].token_ids) > 12
