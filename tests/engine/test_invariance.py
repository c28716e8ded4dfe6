"""A request's tokens do not depend on its neighbors, its instance, its degree or its history.

The tests use a trained model and a random model. The degree changes the order of sums. Everything else leaves the
arithmetic of a token nearly unchanged. So greedy tokens may differ if two logits are closer than `TIE`. Seeded tokens
must not differ: the prompts are chosen so that no draw falls on an edge.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import engine_of
from serving_checks import alone, check_idle, forget_prefixes
from tiny_models import tiny_model

from amoeba_jax import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")

TIE = 1e-3
MAX_TOKENS = 24
NUM_REQUESTS = 8


@dataclass(frozen=True)
class Reference:
    """Requests, with the tokens of each request alone on one device, in chunks of 16."""

    directory: Path
    settings: dict[str, Any]
    prompts: list[list[int]]
    params: list[SamplingParams]
    tokens: list[tuple[int, ...]]
    llm: LLM

    def check(self, llm: LLM, outputs: Sequence[RequestOutput]) -> None:
        """Check that the outputs of all requests have these tokens, up to a tie."""
        for index, output in enumerate(outputs):
            self.check_one(llm, index, output.outputs[0].token_ids)

    def check_one(self, llm: LLM, index: int, tokens: tuple[int, ...]) -> None:
        expected = self.tokens[index]
        if tokens == expected:
            return
        fork = next(i for i in range(MAX_TOKENS) if tokens[i] != expected[i])
        assert self.params[index].temperature == 0, f"seeded request {index} differs at token {fork}"
        logits = llm.logits([*self.prompts[index], *expected[:fork]])[-1]
        gap = abs(logits[tokens[fork]] - logits[expected[fork]])
        assert gap < TIE, f"request {index} differs at token {fork}, where the logits are {gap} apart"


def make_params() -> list[SamplingParams]:
    """Return greedy and seeded settings in turn."""
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [
        SamplingParams(temperature=0.8, top_p=0.9, seed=index, max_tokens=MAX_TOKENS, ignore_eos=True)
        if index % 2
        else greedy
        for index in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module", params=["stories260K", pytest.param("random", marks=pytest.mark.slow)])
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache: str
) -> Iterator[Reference]:
    random = np.random.default_rng(6)
    lengths = [3, 16, 17, 40, 33, 9, 48, 21]
    if request.param == "random":
        directory = tiny_model("llama2", tmp_path_factory.mktemp("models"))
        prompts = [random.integers(0, 211, length).tolist() for length in lengths]
    else:
        directory = request.getfixturevalue("shared_data") / "models" / request.param
        golden = json.loads((directory / "golden.json").read_text())
        story = [token for case in golden["cases"] for token in [*case["prompt_ids"], *case["greedy_ids"]]]
        prompts = [story[7 * length : 8 * length] for length in lengths]
    settings = {
        "page_size": 8,
        "max_model_len": 80,
        "max_num_batched_tokens": 16,
        "max_num_seqs": NUM_REQUESTS // 2,
        "device_memory": "16MiB",
        "compile_cache": compile_cache,
        "progress": False,
    }
    with LLM(directory, **settings) as llm:
        params = make_params()
        tokens = [alone(llm, *each)[0].token_ids for each in zip(prompts, params, strict=True)]
        yield Reference(directory, settings, prompts, params, tokens, llm)


@pytest.mark.slow
def test_in_a_batch(reference: Reference):
    forget_prefixes(reference.llm)
    reference.check(reference.llm, reference.llm.generate(reference.prompts, reference.params))


@pytest.mark.slow
def test_with_cached_prefixes(reference: Reference):
    """Each request finds all full pages of its prompt."""
    for prompt, params in zip(reference.prompts, reference.params, strict=True):
        reference.llm.generate([prompt], params)
    outputs = reference.llm.generate(reference.prompts, reference.params)
    expected = [(len(prompt) - 1) // 8 * 8 for prompt in reference.prompts]
    assert [output.num_cached_tokens for output in outputs] == expected
    reference.check(reference.llm, outputs)


@pytest.mark.slow
def test_in_chunks_of_another_size(reference: Reference):
    larger: dict[str, Any] = {**reference.settings, "max_num_batched_tokens": 64}
    with LLM(reference.directory, **larger) as llm:
        for index, (prompt, params) in enumerate(zip(reference.prompts, reference.params, strict=True)):
            steps = llm.stats.steps
            reference.check_one(llm, index, alone(llm, prompt, params)[0].token_ids)
            chunks = 2 if 16 < len(prompt) <= 32 else 1  # a chunk of 64 would not be half full
            assert llm.stats.steps - steps == MAX_TOKENS + chunks - 1


@pytest.mark.slow
def test_with_preemption(reference: Reference):
    settings: dict[str, Any] = {**reference.settings, "max_num_seqs": 2}
    settings["kv_cache_tokens"] = 11 * settings["page_size"]
    with LLM(reference.directory, **settings) as llm:
        preempted = set()
        for order in (range(NUM_REQUESTS), range(NUM_REQUESTS)[::-1]):  # the later of two requests is preempted
            prompts, params = [reference.prompts[i] for i in order], [reference.params[i] for i in order]
            for index, output in zip(order, llm.generate(prompts, params), strict=True):
                reference.check_one(llm, index, output.outputs[0].token_ids)
                if output.metrics.num_preemptions:
                    preempted.add("greedy" if reference.params[index].temperature == 0 else "seeded")
            check_idle(llm)
        assert preempted == {"greedy", "seeded"}


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
def test_at_every_degree_on_every_instance(reference: Reference, num_devices: int):
    with LLM(reference.directory, num_devices=num_devices, **reference.settings) as llm:
        for tp in (1, 2, 4)[: num_devices.bit_length()]:
            llm.set_layout(tp)
            instances = engine_of(llm).instances
            for index, (prompt, params) in enumerate(zip(reference.prompts, reference.params, strict=True)):
                launched = [instance.num_launched for instance in instances]
                # One request for each instance.
                outputs = llm.generate([prompt] * len(instances), params)
                for output in outputs:
                    reference.check_one(llm, index, output.outputs[0].token_ids)
                new = [instance.num_launched - before for instance, before in zip(instances, launched, strict=True)]
                assert min(new) >= MAX_TOKENS, "each instance served one"
