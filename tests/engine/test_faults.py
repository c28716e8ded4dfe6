"""A single fault ends at most one request or one transformation. All others get their usual tokens.

Other files test logits that are not numbers (test_nan_logits.py), failures at each boundary of a transformation
(test_transform.py), and weights or caches that cannot be rebuilt (test_out_of_service.py).
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import pytest
from device_memory import frozen_heap, live_bytes
from fault_cases import EARLY, NO_MEMORY, Faults, Load, LoadDuringMerge, Outcome, only_fault
from harness import engine_of, in_dispatcher, registry_of
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_config, write_model

from amoeba_jax import LLM
from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import RequestError, RequestFailedError, TransformError
from amoeba_jax.instances.factory import InstanceFactory
from amoeba_jax.instances.sequence import Sequence, Update
from amoeba_jax.instances.step import ResultReader
from amoeba_jax.request import Request
from amoeba_jax.transform.lanes import Requeue
from amoeba_jax.transform.relayout import Relayout

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_steps")]

SETTINGS: dict[str, Any] = {
    "num_devices": 2,
    "device_memory": "8MiB",
    "kv_cache_tokens": 256,
    "page_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "segment_layers": 1,
    "phase_pages": 16,
    "progress": False,
}
CALLS = {
    "step": 126,
    "head": 39,
    "sample_full": 31,
    "exchange": 6,
    "set_state": 7,
    "page_copy": 6,
    "restore": 3,
    "sample": 6,
    "join": 5,
    "split": 2,
    "token_logprobs": 1,
    "take_column": 1,
}
"""Calls of each kind of program in one load."""
RESULTS = ("head", "sample", "sample_full", "token_logprobs", "take_column")
"""Programs whose results the host reads soon."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny_config("llama2") | {"num_hidden_layers": 3}, tmp_path_factory.mktemp("models") / "model")


ELSEWHERE: dict[int, int] = {}
"""Bytes on each device that earlier tests left in this process."""


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with 2 x TP1."""
    ELSEWHERE.update(live_bytes())
    with LLM(directory, compile_cache=compile_cache, **SETTINGS) as llm:
        Load(llm).run()
        with frozen_heap():
            yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, Any]:
    """Return the tokens of the load without a fault."""
    outcome = Load(llm).run()
    assert not outcome.failures
    return outcome.tokens


@pytest.fixture(autouse=True)
def no_records() -> Iterator[None]:
    """Disable logging. Pytest keeps log records, whose errors keep stack frames and device buffers alive."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def ledgers(llm: LLM) -> list[dict[Any, int]]:
    """Return the entries of each device's ledger, without empty entries."""
    return [{key: size for key, size in it.entries.items() if size} for it in engine_of(llm).cluster.ledgers]


def check(llm: LLM, outcome: Outcome, expected: dict[str, Any], before: list[dict[Any, int]]) -> None:
    """Check that at most one failure of a known kind happened, and that another load gives the expected tokens."""
    assert len(outcome.failures) <= 1, outcome.failures
    for error in outcome.failures:
        assert isinstance(error, RequestFailedError | TransformError | RequestError), repr(error)
    outcome.failures.clear()
    assert outcome.tokens == {name: expected[name] for name in outcome.tokens}
    if len(llm.instances) == 1:  # the split failed
        llm.transform(1)
    again = Load(llm).run()
    assert not again.failures
    assert again.tokens == expected
    check_idle(llm)
    assert ledgers(llm) == before
    page = llm.dims.pages.page_elems * 4
    live = live_bytes()
    for device, ledger in enumerate(engine_of(llm).cluster.ledgers):
        # The ledger does not contain the inputs of the last steps.
        assert 0 <= live[device] - ledger.live_bytes < 8 * page + ELSEWHERE.get(device, 0)


def cases(slow: bool) -> Iterator[Any]:
    """Yield a kind of program, its way of failing, and the number of the failing call."""
    for kind, calls in CALLS.items():
        for how in ("before", "after", "unread", "compile", "load"):
            if (how == "unread" and kind not in RESULTS) or (how == "load" and kind not in ("step", "exchange")):
                continue
            made = how in ("compile", "load")
            default = [1] if made else [(calls + 1) // 2]
            every = range(1, 4) if made else range(1, calls + 1, max(1, calls // 12))
            for number in sorted(set(every) - set(default)) if slow else default:
                marks = [pytest.mark.slow] if slow else []
                yield pytest.param(kind, how, number, marks=marks, id=f"{kind}-{how}-{number}")


@pytest.mark.first_by_default
@pytest.mark.parametrize(("kind", "how", "number"), [*cases(slow=False), *cases(slow=True)])
def test_programs_that_fail_once(llm: LLM, expected: dict[str, Any], kind: str, how: str, number: int):
    before = ledgers(llm)
    fault = Faults(kind, how, number)
    with fault.injected(llm):
        outcome = Load(llm).run()
    assert fault.happened or number > 1
    check(llm, outcome, expected, before)


def test_the_load_needs_every_program(llm: LLM, expected: dict[str, Any]):
    calls = Faults()
    with calls.injected(llm):
        Load(llm).run()
    assert calls.calls == CALLS


@pytest.mark.first_by_default
@pytest.mark.parametrize(
    "number", [1, 149, 297, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 400) if n not in (149, 297))]
)
def test_copies_to_devices_that_fail_once(
    llm: LLM, expected: dict[str, Any], number: int, monkeypatch: pytest.MonkeyPatch
):
    before = ledgers(llm)
    with monkeypatch.context() as patch:
        failing, _ = only_fault(jax.device_put, number, jax.errors.JaxRuntimeError(NO_MEMORY))
        patch.setattr(jax, "device_put", failing)
        outcome = Load(llm).run()
    check(llm, outcome, expected, before)


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("kind", ["set_state", "page_copy"])
def test_programs_that_fail_where_a_request_starts_while_layers_switch(
    llm: LLM, expected: dict[str, Any], kind: str, how: str
):
    before, counted = ledgers(llm), Faults()
    with counted.injected(llm):
        assert LoadDuringMerge(llm).run().tokens == expected
    fault = Faults(kind, how, counted.calls[kind])
    with fault.injected(llm):
        outcome = LoadDuringMerge(llm).run()
    assert fault.happened
    failed = [name for name, error in outcome.requests.items() if isinstance(error, BaseException)]
    assert len(failed) <= 1
    assert len(outcome.failures) <= 2, "a request, and the transformation that it has taken along"
    outcome.requests = {name: it for name, it in outcome.requests.items() if name not in failed}
    outcome.transformations = [error for error in outcome.transformations if error is not None]
    check(llm, outcome, expected, before)


def test_a_cache_that_cannot_be_made_again_after_a_failed_switch(
    llm: LLM, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """The group goes out of service and returns at once, because memory is missing only twice."""
    before = ledgers(llm)
    made, count = InstanceFactory.empty_instance, [0]

    def failing(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] in (1, 2):
            raise jax.errors.JaxRuntimeError(NO_MEMORY)
        return made(*arguments)

    fault = Faults("exchange", "after", 2)
    with monkeypatch.context() as patch, fault.injected(llm):
        patch.setattr(InstanceFactory, "empty_instance", failing)
        outcome = Load(llm).run()
    assert fault.happened
    assert count[0] == 3
    check(llm, outcome, expected, before)


def test_a_group_gives_up_what_it_has_before_it_is_made_again(
    llm: LLM, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """The weights that a split restored cannot be read."""
    before, failed, held = ledgers(llm), [], []
    fail, make = Relayout.fail_settled, InstanceFactory.empty_instance

    def watched(self: Relayout, requeue: Requeue) -> str:
        assert self.restored
        failed.append((self, [*(i.site for i in self.cluster.instances), self.high, *self.members]))
        return fail(self, requeue)

    def watched_make(*arguments: Any) -> Any:
        ((transition, sites),) = failed
        held.append(
            [len(buffers) for buffers in (*(site.kv for site in sites), transition.restored, transition._spent)]
        )
        return make(*arguments)

    def unread(reader: ResultReader, arrays: list[jax.Array]) -> "Future[Any]":
        result: Future[Any] = Future()
        result.set_exception(jax.errors.JaxRuntimeError(NO_MEMORY))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Relayout, "fail_settled", watched)
        patch.setattr(InstanceFactory, "empty_instance", watched_make)
        patch.setattr(ResultReader, "when_ready", unread)
        outcome = Load(llm).run()
    assert len(held) == 2, "one for each device"
    assert not any(sum(counts) for counts in held)
    failed.clear()
    check(llm, outcome, expected, before)


def test_a_failed_step_forgets_no_token_of_another_instance(llm: LLM, expected: dict[str, Any]):
    """A request was preempted during its prompt. It runs on another instance when its step on the first one fails."""
    before, load = ledgers(llm), Load(llm)

    def drive(engine: Engine) -> None:
        load._submit(engine, EARLY)
        load._until(engine, lambda: load._have(EARLY, 3))
        engine.advance()
        first, second = engine.instances
        elsewhere = second.pending[-1].sampled[0]
        in_flight = elsewhere.sequence.num_in_flight
        assert in_flight > 0
        step = first.pending[0]
        engine.steps.recover(first, RuntimeError("injected"), [*step.rows, elsewhere], step.sampled)
        assert elsewhere.sequence.num_in_flight == in_flight
        load._until(engine, lambda: not engine.has_requests)

    in_dispatcher(llm, drive, engine_of(llm))
    again = Load(llm).run()
    assert again.tokens == expected
    assert ledgers(llm) == before


@pytest.mark.parametrize("name", ["greedy", "two", "late"])
def test_a_sink_that_raises_ends_its_sequence(llm: LLM, expected: dict[str, Any], name: str):
    """The engine cannot report anything to a broken sink."""
    before = ledgers(llm)
    broken: list[Sequence] = []

    def wrap(asked: str, sequence: Sequence) -> None:
        sink = sequence.sink

        def raising(update: Update) -> None:
            if asked == name and not update.finished and len(sequence.output) == 2 and not broken:
                broken.append(sequence)
                raise ZeroDivisionError
            sink(update)

        sequence.sink = raising

    load = Load(llm, wrap_sink=wrap)
    outcome = Outcome()

    def drive() -> None:
        load._drive(engine_of(llm))

    in_dispatcher(llm, drive)
    assert [sequence.finish_reason for sequence in broken] == ["abort"]
    for asked, (request, deliveries) in load._asked.items():
        if asked != name:
            delivery = deliveries.get(timeout=TIMEOUT_S)
            assert not isinstance(delivery, BaseException)
            outcome.requests[asked] = tuple(completion.token_ids for completion in delivery.completions)
        else:
            registry_of(llm).end([request])
    check(llm, outcome, expected, before)


def test_a_caller_that_takes_no_output_harms_no_other(llm: LLM, expected: dict[str, Any]):
    def raising(_: object) -> None:
        raise ZeroDivisionError

    request: Request = registry_of(llm).make([1, 2, 3], None, raising, "broken", None)
    in_dispatcher(llm, engine_of(llm).submit, [request.sequences[0]])
    assert Load(llm).run().tokens == expected
    registry_of(llm).end([request])


_FULL_DISK = """
import json, resource, signal, sys
from amoeba_jax import LLM, SamplingParams
directory, settings = json.loads(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # every write to a file fails from here on
with LLM(directory, **settings) as llm:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first = llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
    llm.transform(2)
    print(json.dumps([first, llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of file sizes are set as Linux has them")
def test_a_full_disk_of_the_compile_cache_stops_nothing(llm: LLM, directory: Path, tmp_path: Path):
    command = [sys.executable, "-c", _FULL_DISK]
    arguments = json.dumps([str(directory), SETTINGS | {"compile_cache": str(tmp_path / "cache")}])
    environment = os.environ | {"NPROC": "16", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        [*command, arguments], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert len(first) == 8
    assert first == second
