"""Missing programs are compiled beside the steps of running requests. A request waits only for its own programs."""

import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from compile_gate import CompileGate
from harness import engine_of, in_dispatcher, registry_of
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_config, write_model
from transform_cases import Background, requests, tokens, wait_until_decoding

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.accumulate import wait_for
from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import ProgramsNotReadyError, RequestFailedError
from amoeba_jax.programs import executables
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.request import Delivery, Request
from amoeba_jax.transform import change
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.views import TransformState
from serving.runtime.metrics import ServerMetrics
from serving.runtime.scheduling import Scheduling
from serving.runtime.scheduling_config import SchedulingConfig

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

SETTINGS: dict[str, Any] = {
    "device_memory": "16MiB",
    "kv_cache_tokens": 1024,
    "page_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
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


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, for tests in which no layers switch. Its programs compile in half the time."""
    return write_model(tiny_config("llama2") | {"num_hidden_layers": 1}, tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def cold(one_layer: Path) -> Iterator[LLM]:
    """Yield an engine on one device without programs."""
    with LLM(one_layer, **SETTINGS) as llm:
        yield llm


def wait_until(what: Callable[[], bool]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


Started = list[tuple[Request, "queue.SimpleQueue[Delivery]"]]


def made(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Started:
    """Return requests that `submit_all` can submit together."""

    def make(prompt: list[int]) -> tuple[Request, "queue.SimpleQueue[Delivery]"]:
        deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        return registry_of(llm).make(prompt, params, deliveries.put, None, None, every_token=False), deliveries

    return [make(prompt) for prompt in prompts]


def submit_all(engine: Engine, started: Started) -> None:
    engine.submit([sequence for request, _ in started for sequence in request.sequences])


def tokens_of(started: Started) -> list[list[tuple[int, ...]]]:
    return [[tuple(output.token_ids) for output in wait_for(*one).outputs] for one in started]


def test_a_request_goes_on_while_the_next_waits_for_its_program(cold: LLM):
    cold.generate([[1, 2, 3]], greedy(4))  # compiles a prompt alone and one decode
    gate = CompileGate(cold)
    first = Background(cold, [[4, 5, 6]], greedy(200))
    wait_until_decoding(cold, 1)
    second = Background(cold, [[7, 8, 9]], SamplingParams(temperature=1, seed=1, max_tokens=8, ignore_eos=True))
    (output,) = first.result()
    assert len(output.outputs[0].token_ids) == 200
    assert second._thread.is_alive(), "it has no program to be sampled with"
    assert any("sample" in name for name in gate.asked())
    gate.open.set()
    got = tokens([output, *second.result()])
    assert got[0] == tokens(cold.generate([[4, 5, 6]], greedy(200)))[0]
    seeded = SamplingParams(temperature=1, seed=1, max_tokens=8, ignore_eos=True)
    assert got[1] == tokens(cold.generate([[7, 8, 9]], seeded))[0]
    check_idle(cold)


def test_a_larger_step_does_meanwhile(cold: LLM):
    expected = tokens(cold.generate([[n + 1] * 3 for n in range(4)], greedy(12)))
    gate = CompileGate(cold)
    assert tokens(cold.generate([[n + 1] * 3 for n in range(3)], greedy(12))) == expected[:3]
    assert tokens(cold.generate([[n + 1] * 3 for n in range(2)], greedy(12))) == expected[:2]
    assert any(" 2x1 " in name for name in gate.asked()), "the smaller one is to come"
    gate.open.set()
    check_idle(cold)


def test_decodes_go_on_in_the_step_of_their_prompt(cold: LLM):
    """The step without room for a prompt is the next to compile. Its compilation is delayed here."""
    background = engine_of(cold).cluster.executables.background
    compile, arrived = background._compile, threading.Event()

    def without_decodes(wanted: list[ProgramSpec]):
        if wanted[0].kind == "step" and re.search(r"\b\d+x1\b(?!\+)", str(wanted[0])):
            held.append(str(wanted[0]))
            assert arrived.wait(TIMEOUT_S)
        yield from compile(wanted)

    held: list[str] = []
    background._compile = without_decodes
    (output,) = cold.generate([[1, 2, 3]], greedy(12))
    assert held, "programs that only decode are to come"
    arrived.set()
    wait_until(lambda: not background.num_left)
    assert tokens([output]) == tokens(cold.generate([[1, 2, 3]], greedy(12)))
    check_idle(cold)


def test_a_program_that_fails_ends_those_who_need_it(cold: LLM):
    cold.generate([[1, 2, 3]], greedy(4))
    background = cold._engine.cluster.executables.background
    compile = background._compile

    def failing(wanted: list[ProgramSpec]):
        if wanted[0].kind == "sample":
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


def test_a_step_whose_program_fails_is_computed_in_another_shape(cold: LLM, monkeypatch: pytest.MonkeyPatch):
    """Programs for 8 requests are ready. Programs for one request fail to compile, but it does not need them.

    The engine retries the compilation a few times, at intervals.
    """
    asked = [[n + 1, 2, 3] for n in range(8)]
    together = made(cold, asked, greedy(60))
    in_dispatcher(cold, submit_all, engine_of(cold), together)  # submitted one by one, the first could run alone
    expected = tokens_of(together)
    background = cold._engine.cluster.executables.background
    compile, failed = background._compile, []

    def failing(wanted: list[ProgramSpec]):
        if wanted[0].kind == "step":
            failed.append(str(wanted[0]))
            raise RuntimeError("injected")
        yield from compile(wanted)

    background._compile = failing
    for _ in range(3):
        assert tokens(cold.generate(asked[:1], greedy(60))) == expected[:1]
    assert failed
    assert len(failed) == len(set(failed)), "and they are not compiled again and again"
    monkeypatch.setattr(executables, "_RETRY_S", 0.0)
    monkeypatch.setattr(executables, "_MAX_RETRIES", 1)
    cold._engine.cluster.executables._retry_at = 0.0
    for _ in range(4):
        assert tokens(cold.generate(asked[:1], greedy(60))) == expected[:1]
        wait_until(lambda: not background.num_left)
    again = [name for name, count in Counter(failed).items() if count == 2]
    assert again, "once more"
    assert len(failed) <= 2 * len(set(failed))
    monkeypatch.setattr(executables, "_MAX_RETRIES", 2)
    background._compile = compile
    cold._engine.cluster.executables._retry_at = 0.0
    for _ in range(2):
        assert tokens(cold.generate(asked[:1], greedy(60))) == expected[:1]
        wait_until(lambda: not background.num_left)
    assert not {str(program.spec) for program in engine_of(cold).cluster.executables}.isdisjoint(again)
    check_idle(cold)


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the programs compiled at a launch."""
    made: list[str] = []
    make = Executables._make

    def counted(self: Executables, request: ProgramSpec):
        made.append(str(request))
        return make(self, request)

    monkeypatch.setattr(Executables, "_make", counted)
    return made


@pytest.mark.slow
def test_load_and_transformations_from_the_start(directory: Path, between: list[str]):
    """No request waits for a program that only others need."""
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


@pytest.mark.slow
def test_a_request_that_starts_while_layers_switch_has_its_programs_afterwards(directory: Path, between: list[str]):
    """The devices of the new instances have not sampled such a request yet."""
    penalized = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=12, ignore_eos=True)
    with LLM(directory, num_devices=2, **SETTINGS) as llm:
        for degree in (2, 1, 2):
            running = Background(llm, [[n + 1, 2, 3] for n in range(4)], greedy(100))
            wait_until_decoding(llm, 4)
            llm.transform(degree, layers_per_step=1)
            running.result()
        prompts = [[4, 5, 6], [7, 8, 9]]  # one for each device
        expected = tokens(llm.generate(prompts, penalized))
        running = Background(llm, [[n + 1, 2, 3] for n in range(4)], greedy(200))
        wait_until_decoding(llm, 4)

        def split(engine: Engine) -> None:
            engine.drain()
            engine.transform(TransformOptions(1, (0, 1), layers_per_step=1))
            assert any(instance.transition is not None for instance in engine.instances)
            submit_all(engine, late)

        late = made(llm, prompts, penalized)
        in_dispatcher(llm, split, engine_of(llm))
        assert tokens_of(late) == expected
        running.result()
        assert len(llm.instances) == 2
        assert not between
        check_idle(llm)


def test_a_warmup_in_the_background(directory: Path):
    """Degrees become ready one after the other. The degree of the present instances comes first."""
    with LLM(directory, num_devices=2, **SETTINGS | {"max_num_seqs": 2}, strict_compile=True) as llm:
        llm.warmup([1])
        gate = CompileGate(llm)
        missing = llm.warmup([1, 2], background=True)
        first, second = llm.stats.degrees
        assert (first.degree, second.degree) == (1, 2)
        assert first.ready
        assert second.num_programs - second.num_ready == missing > 0
        with pytest.raises(ProgramsNotReadyError, match=f"TP2 is not ready: {missing} of its {second.num_programs}"):
            llm.transform(2, wait_for_programs=False)
        asked = requests(6, max_tokens=20)
        load = Background(llm, *asked)
        waiting = ThreadPoolExecutor(1).submit(llm.transform, 2)
        got = tokens(load.result())
        assert not waiting.done(), "requests are served meanwhile, and it waits"
        gate.open.set()
        assert waiting.result(TIMEOUT_S).tensor_parallel_size == 2
        wait_until(lambda: all(it.ready for it in llm.stats.degrees))
        assert engine_of(llm).cluster.executables.complete
        assert tokens(llm.generate(*asked)) == got
        llm.transform(1, wait_for_programs=False)
        assert llm.stats.late_programs == 0
        assert llm.stats.compiled_programs == first.num_programs + second.num_programs
        check_idle(llm)


@pytest.mark.slow
def test_a_transformation_says_what_it_waits_for(
    one_layer: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Log lines, the statistics of the engine and the report say it."""
    monkeypatch.setattr(change, "_LOG_INTERVAL_S", 0.0)
    with LLM(one_layer, num_devices=2, **SETTINGS) as llm, ThreadPoolExecutor(1) as pool:
        llm.generate([[1, 2, 3]], greedy(4))
        gate = CompileGate(llm)
        load = Background(llm, [[4, 5, 6]], greedy(200))
        wait_until_decoding(llm, 1)
        waiting = pool.submit(llm.transform, 2)
        wait_until(lambda: bool(llm.stats.transformations))
        (status,) = llm.stats.transformations
        load.result()
        gate.open.set()
        report = waiting.result(TIMEOUT_S)
        assert (status.tensor_parallel_size, status.devices) == (2, (0, 1))
        assert status.state == TransformState.AWAITING_PROGRAMS
        assert status.estimated_s is not None
        assert 0 < status.programs_left <= report.awaited_programs
        assert 0 < report.waited_s < report.seconds
        assert f"waiting for programs ({report.awaited_programs})" in " ".join(str(report).split())
        mine = [record for record in caplog.records if record.name == change.__name__]
        first, *others, last = [record.getMessage() for record in mine]
        left = f"waits for {status.programs_left} programs, about {status.estimated_s:.0f} s"
        assert first == f"the transformation to TP2 {left}"
        numbers = [int(re.findall(r"waits for (\d+) program", line)[0]) for line in (first, *others)]
        assert numbers == sorted(set(numbers), reverse=True)
        assert re.fullmatch(r"the transformation to TP2 goes on after \d+\.\d s: its programs are ready", last)
        caplog.clear()
        load = Background(llm, [[4, 5, 6]], greedy(200))
        wait_until_decoding(llm, 1)
        llm.transform(1, running="wait")
        load.result()
        assert "the transformation to TP1 waits for 1 request" in caplog.messages
        assert not llm.stats.transformations
        check_idle(llm)


def test_no_request_starts_on_devices_that_wait_for_requests_and_then_for_programs(one_layer: Path):
    with LLM(one_layer, num_devices=2, **SETTINGS) as llm, ThreadPoolExecutor(1) as pool:
        llm.generate([[1, 2, 3]], greedy(4))
        gate = CompileGate(llm)
        load = Background(llm, [[4, 5, 6]], greedy(100))
        wait_until_decoding(llm, 1)
        waiting = pool.submit(llm.transform, 2, running="wait")
        states: list[str] = []

        def has_state(wanted: str) -> bool:
            states.extend(it.state for it in llm.stats.transformations)
            return states[-1:] == [wanted]

        wait_until(lambda: has_state(TransformState.AWAITING_REQUESTS))
        load.result()
        wait_until(lambda: has_state(TransformState.AWAITING_PROGRAMS))
        later = Background(llm, [[7, 8, 9]], greedy(4))
        wait_until(lambda: any(it.waiting for it in llm.instances))
        assert not any(it.running for it in llm.instances)
        gate.open.set()
        assert waiting.result(TIMEOUT_S).tensor_parallel_size == 2
        assert len(later.result()[0].outputs[0].token_ids) == 4
        check_idle(llm)


def test_a_warmup_in_the_background_that_finds_everything(cold: LLM):
    cold.warmup()
    assert cold.warmup(background=True) == 0
    assert [it.ready for it in cold.stats.degrees] == [True]
    assert cold._engine.cluster.executables.complete


@pytest.mark.slow
def test_a_policy_does_not_plan_for_a_degree_that_is_not_ready(directory: Path):
    """A request that needs the degree waits until the degree is ready."""
    settings = SETTINGS | {"kv_cache_tokens": 64, "max_num_seqs": 2, "max_model_len": 100}
    with LLM(directory, num_devices=2, **settings) as llm:
        llm.warmup([1])
        gate = CompileGate(llm)
        llm.warmup([1, 2], background=True)
        scheduling = Scheduling(llm, SchedulingConfig("amoeba"), ServerMetrics())
        short, long = [[1, 2, 3]], [list(range(1, 81))]
        waiting = Background(llm, long, greedy(8))
        assert len(tokens(llm.generate(short, greedy(8)))[0][0]) == 8
        view = in_dispatcher(llm, scheduling._hook.scheduler.executor.snapshot)
        assert [(limits.degree, limits.ready) for limits in view.degrees] == [(1, True), (2, False)]
        assert ((0, 1), 2) in view.refused
        assert scheduling.counters.refused == scheduling.counters.scale_ups == 0
        gate.open.set()
        assert len(tokens(waiting.result())[0][0]) == 8
        assert scheduling.counters.scale_ups == 1
        assert scheduling.counters.refused == 0
        scheduling.close()


def test_a_policy_waits_for_programs_that_no_warmup_brings(directory: Path):
    """The first scale-up is refused. The policy asks again when the programs are ready."""
    settings = SETTINGS | {"kv_cache_tokens": 64, "max_num_seqs": 2, "max_model_len": 100}
    with LLM(directory, num_devices=2, **settings) as llm:
        scheduling = Scheduling(llm, SchedulingConfig("amoeba"), ServerMetrics())
        long = Background(llm, [list(range(1, 81))], greedy(8))
        assert len(tokens(llm.generate([[1, 2, 3]], greedy(8)))[0][0]) == 8
        assert len(tokens(long.result())[0][0]) == 8
        assert scheduling.counters.refused == 1
        assert scheduling.counters.scale_ups == 1
        scheduling.close()
