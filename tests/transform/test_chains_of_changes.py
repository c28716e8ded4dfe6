"""Logits in the middle of random chains of changes equal the logits of `transformers`, in every layout."""

import importlib.util
import queue
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import engine_of, in_dispatcher, registry_of
from pausing_cases import ALL
from serving_checks import TIMEOUT_S, check_idle, forget_prefixes
from tiny_models import ragged_prompts, tiny_model
from transform_cases import SHARED, make

from amoeba_jax import LLM, RequestOutput, SamplingParams
from amoeba_jax.accumulate import wait_for
from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import RequestError
from amoeba_jax.request import Delivery
from amoeba_jax.transform.options import TransformOptions

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

GOLDEN = Path(__file__).parent.parent / "golden"
NEW_TOKENS = 12
TOLERANCE, NLL_DRIFT = 1e-4, 1e-6
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5, prompt_logprobs=5)


CASES = [("llama2", seed) for seed in range(24)] + [("qwen3-moe", 0), ("qwen3-moe", 1), ("qwen3-moe-mixed", 0)]


@pytest.fixture(scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def directory(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(name, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with make(directory, compile_cache, **SHARED, transform_attention=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> list[RequestOutput]:
    found = [llm.generate(prompt, PARAMS)[0] for prompt in ragged_prompts(llm.dims.config.vocab_size)]
    forget_prefixes(llm)
    return found


@pytest.fixture(scope="module")
def expected(name: str, directory: Path) -> list[tuple[list[int], np.ndarray]]:
    """Return for each prompt its tokens with the greedy continuation, and the logits before each token but the first.

    Without torch, only the recorded logits of the last 16 tokens are known. The others are NaN.
    """
    golden, found = np.load(GOLDEN / f"{name}.npz"), []
    for index in range(sum(name.startswith("tokens_") for name in golden)):
        tokens, recorded = golden[f"tokens_{index}"].tolist(), golden[f"logits_{index}"]
        logits = np.full((len(tokens) - 1, recorded.shape[1]), np.nan, np.float32)
        logits[-len(recorded) :] = recorded
        found.append((tokens, logits))
    if importlib.util.find_spec("torch") is None:
        return found
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        return [(tokens, model(torch.tensor([tokens[:-1]])).logits[0].numpy()) for tokens, _ in found]


class Chain:
    """Random changes of the layout between two steps, until all requests have ended."""

    def __init__(self, llm: LLM, seed: int):
        self._llm, self._random = llm, random.Random(seed)
        self.changes: list[str] = []

    def run(self) -> list[RequestOutput]:
        made, asked = [], ragged_prompts(self._llm.dims.config.vocab_size)
        for prompt in asked:
            deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
            made.append(
                (registry_of(self._llm).make(prompt, PARAMS, deliveries.put, None, None, every_token=False), deliveries)
            )
        in_dispatcher(self._llm, self._drive, engine_of(self._llm), [request.sequences[0] for request, _ in made])
        return [wait_for(request, deliveries) for request, deliveries in made]

    def _drive(self, engine: Engine, sequences: list) -> None:
        for _ in range(600):
            if sequences and self._random.random() < 0.6:
                engine.submit([sequences.pop()])
            if not sequences and not engine.has_requests:
                engine.end_transformations()  # wait for weights that are being restored
                return
            if not engine.changes.busy:
                self._change(engine)
            engine.advance()
            engine.drain()
        raise AssertionError("the requests never end")

    def _change(self, engine: Engine) -> None:
        running = self._random.choice(["migrate", "migrate", "pause"])
        degree = self._random.choice([1, 2, 4])
        release = running != "pause" and self._random.random() < 0.5
        paused = {member.tp for instance in engine.instances for member in instance.paused}
        if paused and (engine.num_paused or running == "pause"):
            running, (degree,) = "migrate", paused  # resume the paused requests while others run
        try:
            engine.transform(TransformOptions(degree, ALL, layers_per_step=1, release_weights=release, running=running))
            self.changes.append(f"{running} to TP{degree}, {release=}")
        except RequestError as error:
            self.changes.append(f"refused: {error}")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def logprobs_of(output: RequestOutput) -> list[dict[int, float]]:
    """Return the log-probabilities before each token but the first."""
    every = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
    return [{token: it.logprob for token, it in entries.items()} for entries in every if entries is not None]


@pytest.mark.first_by_default
@pytest.mark.parametrize(("name", "seed"), CASES, indirect=["name"])
def test_logits_in_the_middle_of_chains(
    llm: LLM, undisturbed: list[RequestOutput], expected: list[tuple[list[int], np.ndarray]], seed: int
):
    chain = Chain(llm, seed)
    outputs = chain.run()
    assert len([change for change in chain.changes if not change.startswith("refused")]) >= 5
    checked = 0
    for output, alone, (tokens, logits) in zip(outputs, undisturbed, expected, strict=True):
        assert [*output.prompt_token_ids, *output.outputs[0].token_ids] == tokens
        found = logprobs_of(output)
        assert len(found) == len(tokens) - 1
        for entries, row in zip(found, log_softmax(logits), strict=True):
            if not np.isnan(row).any():
                checked += 1
                assert {t: pytest.approx(row[t], abs=TOLERANCE) for t in entries} == entries
        nll = [-np.mean([e[t] for e, t in zip(it, tokens[1:], strict=True)]) for it in (found, logprobs_of(alone))]
        assert abs(nll[0] - nll[1]) <= NLL_DRIFT
    assert checked >= NEW_TOKENS * len(expected)
    if llm.instances[0].tensor_parallel_size > 1 or len(llm.instances) < 4:
        llm.transform(1)
    check_idle(llm)
