"""Interrupts, several engines in one process, and resources that closing returns."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from device_memory import live_bytes, settled_live_bytes
from harness import registry_of
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import ragged_prompts, tiny_model

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import EngineClosedError
from amoeba_jax.instances.sequence import Update
from amoeba_jax.request import Request

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)
PROMPTS = ragged_prompts(211)


@pytest.fixture(scope="module")
def settings(compile_cache: str) -> dict:
    return {
        "device_memory": "4MiB",
        "page_size": 8,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "compile_cache": compile_cache,
        "progress": False,
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llm(directory: Path, settings: dict) -> Iterator[LLM]:
    with LLM(directory, **settings) as llm:
        yield llm


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


@contextmanager
def other_thread(function: Callable[[], object]) -> Iterator[None]:
    """Run a function in another thread during the block. Raise its error, or fail if it does not end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(TIMEOUT_S / 2)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def wait_until_running(llm: LLM, count: int = 1) -> None:
    pause = threading.Event()
    while sum(instance.running for instance in llm.instances) < count:
        pause.wait(0.001)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal. Background jobs of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_when_running(llm: LLM, count: int = 1) -> None:
    """Interrupt the main thread, as Ctrl-C does, when `count` sequences run. Sequences of the caller's block count."""
    main = threading.main_thread().ident
    assert main is not None
    wait_until_running(llm, count)
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.slow
def test_interrupt_ends_the_requests_of_generate(llm: LLM):
    expected = tokens(llm)
    with other_thread(lambda: interrupt_when_running(llm)), pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, index] for index in range(64)], ENDLESS, request_ids=[f"r{i}" for i in range(64)])
    check_idle(llm)
    assert not llm.cancel("r0")
    assert tokens(llm) == expected


def test_interrupt_ends_the_request_of_a_stream(llm: LLM):
    expected = tokens(llm)

    def read() -> None:
        while True:  # until the interrupt arrives
            for output in llm.stream([1, 2, 3], ENDLESS):
                assert output.error is None

    with other_thread(lambda: interrupt_when_running(llm)), pytest.raises(KeyboardInterrupt):
        read()
    check_idle(llm)
    assert tokens(llm) == expected


def test_interrupt_in_the_body_of_a_loop_ends_the_stream(llm: LLM):
    def read() -> None:
        for _ in llm.stream([1, 2, 3], ENDLESS):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read()
    check_idle(llm)


def test_stream_cancelled_before_its_loop_is_over_at_once(llm: LLM):
    stream = llm.stream([1, 2, 3], ENDLESS, request_id="early")
    assert llm.cancel("early")
    (output,) = stream
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ((), "abort")
    check_idle(llm)


def test_stream_that_never_starts_gives_its_id_back(llm: LLM):
    stream = llm.stream([1, 2, 3], GREEDY, request_id="once")
    del stream
    check_idle(llm)
    assert len(list(llm.stream([1, 2, 3], GREEDY, request_id="once"))) == 8


def test_stream_that_is_over_leaves_a_new_one_of_its_id_alone(llm: LLM):
    first = llm.stream([1, 2, 3], GREEDY, request_id="again")
    list(first)
    second = llm.stream([1, 2, 3], GREEDY, request_id="again")
    del first
    assert llm.cancel("again")
    assert [output.outputs[0].finish_reason for output in second] == ["abort"]


def test_abandoned_stream_may_be_collected_while_requests_are_registered(llm: LLM):
    """The garbage collector may run at any allocation, also while the registry is locked."""

    def collect() -> None:
        holder: dict = {"stream": llm.stream([1, 2, 3], ENDLESS)}
        holder["self"] = holder
        next(holder["stream"])
        del holder
        with registry_of(llm)._lock:
            gc.collect()

    with other_thread(collect):
        pass
    check_idle(llm)


def test_call_that_is_cancelled_while_it_is_queued_does_no_harm(llm: LLM):
    """For example, the task of an `astream` is cancelled while it submits its request."""
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def block() -> None:
        begun.set()
        go_on.wait(TIMEOUT_S)

    blocking = llm._dispatcher.call(block)
    assert begun.wait(TIMEOUT_S)
    queued = llm._dispatcher.call(done.append, "cancelled")
    assert queued.cancel()
    go_on.set()
    blocking.result(TIMEOUT_S)
    assert len(tokens(llm)) == len(PROMPTS)
    assert not done
    check_idle(llm)


@pytest.mark.slow
def test_two_engines_take_turns(llm: LLM, settings: dict, tmp_path: Path):
    expected = tokens(llm)
    with LLM(tiny_model("qwen3", tmp_path), **settings) as other:
        first = tokens(other)
        assert first != expected
        for prompt, mine, others in zip(PROMPTS, expected, first, strict=True):
            assert tokens(llm, [prompt]) == [mine]
            assert tokens(other, [prompt]) == [others]
    assert tokens(llm) == expected


_TWO_ENGINES = """
import json, sys, threading
from amoeba_jax import LLM, SamplingParams
directories, settings, prompts, rounds = json.loads(sys.argv[1])
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
engines = [LLM(directory, **settings) for directory in directories]
alone = [tokens(engine) for engine in engines]
wrong = []
def work(index):
    for _ in range(rounds):
        if tokens(engines[index]) != alone[index]:
            wrong.append(index)
threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1, 0, 1)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for engine in engines: engine.close()
print(json.dumps({"wrong": wrong, "differ": alone[0] != alone[1]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_two_engines_work_at_once(directory: Path, settings: dict, tmp_path: Path, tp: int):
    """Both use the same devices. They run in another process, because a deadlock of collectives would end this one."""
    directories = [str(directory), str(tiny_model("qwen3", tmp_path))]
    arguments = [directories, settings | {"num_devices": tp, "tensor_parallel_size": tp}, PROMPTS, 20]
    figures = run_script(_TWO_ENGINES, json.dumps(arguments))
    assert figures == {"wrong": [], "differ": True}


_RESIDENT = """
import gc, json, os, sys
from amoeba_jax import LLM, SamplingParams
directory, settings = json.loads(sys.argv[1])
params = SamplingParams(temperature=0, max_tokens=4)
def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
with LLM(directory, **settings) as llm:  # JAX, its threads and the programs are not the engine's
    llm.generate([[1, 2, 3]], params)
before = resident()
llm = LLM(directory, **settings | {"device_memory": "256MiB"})
llm.generate([[1, 2, 3]], params)
present = resident()
llm.close()
print(json.dumps({"added": present - before, "left": resident() - before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read as Linux reports it")
def test_close_returns_memory_to_the_system(directory: Path, settings: dict):
    figures = run_script(_RESIDENT, json.dumps([str(directory), settings]))
    assert figures["added"] > 200e6, figures
    assert figures["left"] < figures["added"] / 2, figures


def run_script(script: str, *arguments: str) -> dict:
    """Run a script in another process. Return the data of its last line."""
    command = [sys.executable, "-c", script, *arguments]
    environment = os.environ | {"NPROC": "16", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_close_after_interrupts_cancels_and_streams_leaves_no_buffer(directory: Path, settings: dict):
    before = settled_live_bytes()
    llm = LLM(directory, **settings)
    stream = llm.stream([1, 2, 3], ENDLESS)
    next(stream)
    with other_thread(lambda: interrupt_when_running(llm, 2)), pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, index] for index in range(16)], ENDLESS)
    llm.close()
    assert live_bytes() == before
    with pytest.raises(EngineClosedError, match="closed"):
        list(stream)


def test_close_ends_what_other_threads_wait_for(directory: Path, settings: dict):
    llm = LLM(directory, **settings)

    def work() -> None:
        with pytest.raises(EngineClosedError, match="the engine was closed"):
            llm.generate([[1, 2, index] for index in range(64)], ENDLESS)

    with other_thread(work):
        wait_until_running(llm)
        llm.close()


def test_error_in_a_with_block_closes_the_engine(directory: Path, settings: dict, llm: LLM):
    def fail() -> None:
        with LLM(directory, **settings) as failed:
            next(failed.stream([1, 2, 3], ENDLESS))
            raise ZeroDivisionError

    before = settled_live_bytes()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert live_bytes() == before
    with LLM(directory, **settings) as again:
        assert tokens(again) == tokens(llm)


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: next(llm.stream([1])),
        lambda llm: llm.generate([[1], [2]]),
        lambda llm: llm.logits([1]),
        lambda llm: llm.set_layout(1),
        lambda llm: llm.warmup(),
        lambda llm: llm.instances,
        lambda llm: llm.stats,
    ],
    ids=["stream", "generate", "logits", "set_layout", "warmup", "instances", "stats"],
)
def test_whatever_is_asked_after_closing_gets_a_clear_error(directory: Path, settings: dict, use: Callable):
    llm = LLM(directory, **settings)
    llm.close()
    with pytest.raises(EngineClosedError, match=r"the engine is closed: close\(\) was called"):
        use(llm)
    assert not llm.cancel("unknown")


def test_request_whose_text_fails_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    good = llm.stream([4, 5, 6], ENDLESS)
    next(good)
    add_tokens = Request._add_tokens

    def failing(self: Request, completion: Any, update: Update) -> None:
        if self.id == "bad":
            raise UnicodeError("no text for this token")
        add_tokens(self, completion, update)

    monkeypatch.setattr(Request, "_add_tokens", failing)
    with pytest.raises(UnicodeError, match="no text for this token"):
        list(llm.stream([1, 2, 3], ENDLESS, request_id="bad"))
    assert next(good).outputs[0].token_ids
    good.close()
    check_idle(llm)
