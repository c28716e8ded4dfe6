"""Programs that are missing are compiled beside the steps of running requests: each waits for its own programs alone."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_config, write_model
from transform_cases import Background, requests, tokens, wait_until_decoding

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.executables import Executables
from amoeba_jax.engine.program_requests import ProgramRequest
from amoeba_jax.errors import RequestFailedError

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

SETTINGS: dict[str, Any] = {
    "device_memory": "16MiB",
    "kv_cache_tokens": 1024,
    "page_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "segment_layers": 1,
    "phase_pages": 16,
    "compile_beside": True,
    "compile_cache": "",
    "progress": False,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny_config("llama2") | {"num_hidden_layers": 2}, tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def cold(directory: Path) -> Iterator[LLM]:
    """One device, and no program yet."""
    with LLM(directory, **SETTINGS) as llm:
        yield llm


class Gate:
    """Holds what is compiled in the background, or some of it, until it is opened."""

    def __init__(self, llm: LLM):
        self.open = threading.Event()
        self.held: list[str] = []
        background = llm._engine.cluster.executables.background
        compile = background._compile

        def waiting(wanted: list[ProgramRequest]):
            self.held += [str(request) for request in wanted if not self.open.is_set()]
            assert self.open.wait(TIMEOUT_S)
            yield from compile(wanted)

        background._compile = waiting


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def test_a_request_goes_on_while_the_next_waits_for_its_program(cold: LLM):
    cold.generate([[1, 2, 3]], greedy(4))  # a prompt alone, and one decode
    gate = Gate(cold)
    first = Background(cold, [[4, 5, 6]], greedy(200))
    wait_until_decoding(cold, 1)
    second = Background(cold, [[7, 8, 9]], SamplingParams(temperature=1, seed=1, max_tokens=8, ignore_eos=True))
    (output,) = first.result()
    assert len(output.outputs[0].token_ids) == 200
    assert second._thread.is_alive(), "it has no program to be sampled with"
    assert any("draw" in name for name in gate.held)
    gate.open.set()
    got = tokens([output, *second.result()])
    assert got[0] == tokens(cold.generate([[4, 5, 6]], greedy(200)))[0]
    seeded = SamplingParams(temperature=1, seed=1, max_tokens=8, ignore_eos=True)
    assert got[1] == tokens(cold.generate([[7, 8, 9]], seeded))[0]
    check_idle(cold)


def test_a_larger_step_does_meanwhile(cold: LLM):
    expected = tokens(cold.generate([[n + 1] * 3 for n in range(4)], greedy(12)))
    gate = Gate(cold)
    assert tokens(cold.generate([[n + 1] * 3 for n in range(3)], greedy(12))) == expected[:3]
    assert tokens(cold.generate([[n + 1] * 3 for n in range(2)], greedy(12))) == expected[:2]
    assert any("2x1" in name for name in gate.held), "the smaller one is on its way"
    gate.open.set()
    check_idle(cold)


def test_a_program_that_fails_ends_those_who_need_it(cold: LLM):
    cold.generate([[1, 2, 3]], greedy(4))
    background = cold._engine.cluster.executables.background
    compile = background._compile

    def failing(wanted: list[ProgramRequest]):
        if wanted[0].kind == "draw":
            raise RuntimeError("injected")
        yield from compile(wanted)

    background._compile = failing
    first = Background(cold, [[4, 5, 6]], greedy(200))
    with pytest.raises(RequestFailedError, match="injected"):
        cold.generate([[7, 8, 9]], SamplingParams(temperature=1, seed=1, max_tokens=8))
    assert len(first.result()[0].outputs[0].token_ids) == 200
    background._compile = compile
    cold.generate([[7, 8, 9]], SamplingParams(temperature=1, seed=1, max_tokens=8))
    check_idle(cold)


def test_load_and_transformations_from_the_start(directory: Path, monkeypatch: pytest.MonkeyPatch):
    """Nobody waits for a program that others need: none is compiled where steps are launched."""
    between: list[str] = []
    make = Executables._make

    def counted(self: Executables, request: ProgramRequest):
        between.append(str(request))
        return make(self, request)

    monkeypatch.setattr(Executables, "_make", counted)
    with LLM(directory, num_devices=4, **SETTINGS) as llm:
        asked = requests(12, max_tokens=60)
        loads = [Background(llm, *asked) for _ in range(2)]
        for degree in (2, 4, 1):
            report = llm.transform(degree)
            assert report.tensor_parallel_size == degree
        got = [tokens(load.result()) for load in loads]
        assert not between
        expected = tokens(llm.generate(*asked))
        assert got == [expected, expected]
        check_idle(llm)
