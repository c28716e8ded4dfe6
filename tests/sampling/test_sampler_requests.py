"""Requests at limits of the sampler: bad words, tokens without logits, and seeds."""

from collections.abc import Iterator
from string import ascii_letters

import pytest
from serving_checks import check_idle
from tiny_models import byte_model, byte_token
from tokenizers import Tokenizer

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.sampling.rows import MAX_BAD_WORD_PAIRS

pytestmark = pytest.mark.usefixtures("quick_compile")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
EXTRA = "<extra>"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Provide a model of 256 tokens with a tokenizer of 257 tokens."""
    directory = byte_model(tmp_path_factory.mktemp("models") / "one")
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.add_tokens([EXTRA]) == 1
    tokenizer.save(path)
    with LLM(
        directory,
        device_memory="8MiB",
        page_size=8,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        max_model_len=64,
        compile_cache=compile_cache,
        progress=False,
    ) as llm:
        assert llm.tokenizer is not None
        assert llm.tokenizer.encode(EXTRA) == [llm.dims.config.vocab_size]
        yield llm


def first_tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, params)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.outputs[0].token_ids for output in outputs]


def test_bad_words_of_tokens_without_logits_are_served(llm: LLM):
    """These tokens never occur, so the words need no ban. Other bad words still apply."""
    expected = first_tokens(llm, [[1, 2, 3]], GREEDY)
    words = [EXTRA, f"a{EXTRA}", f"{EXTRA}b"]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, bad_words=words)
    assert first_tokens(llm, [[1, 2, 3]], params) == expected
    letters = [byte_token("a"), byte_token("b")]
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, bad_words=[*words, "a"], allowed_token_ids=letters
    )
    assert first_tokens(llm, [[1, 2, 3]], params) == [(byte_token("b"),) * 4]


def test_too_many_bad_words_are_refused_alone(llm: LLM):
    """Each word has two forms of several tokens. As many words as the limit allows are served."""
    expected = first_tokens(llm, [[1, 2, 3]], GREEDY)
    words = [first + second for first in ascii_letters for second in ascii_letters]
    most, more = (
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, bad_words=words[: MAX_BAD_WORD_PAIRS // 2 + count])
        for count in (0, 1)
    )
    good, bad, last = llm.generate([[1, 2, 3]] * 3, [GREEDY, more, most])
    assert good.outputs[0].token_ids == expected[0]
    assert bad.error is not None
    assert f"bad_words have {MAX_BAD_WORD_PAIRS + 2} forms" in bad.error
    assert f"limit of {MAX_BAD_WORD_PAIRS}" in bad.error
    assert (last.error, len(last.outputs[0].token_ids)) == (None, 4)
    check_idle(llm)


@pytest.mark.slow
def test_samples_of_unseeded_requests_do_not_repeat_each_other(llm: LLM):
    params = SamplingParams(n=16, max_tokens=16, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3]] * 10, params)
    samples = [completion.token_ids for output in outputs for completion in output.outputs]
    assert len(samples) == 160
    assert len(set(samples)) > 0.99 * 160


def test_samples_of_a_seeded_request_have_the_seeds_after_it(llm: LLM):
    params = SamplingParams(n=3, seed=2**32 - 2, max_tokens=8, ignore_eos=True)
    samples = [completion.token_ids for completion in llm.generate([1, 2, 3], params)[0].outputs]
    for seed, sample in zip((2**32 - 2, 2**32 - 1, 0), samples, strict=True):
        assert first_tokens(llm, [[1, 2, 3]], SamplingParams(seed=seed, max_tokens=8, ignore_eos=True)) == [sample]
