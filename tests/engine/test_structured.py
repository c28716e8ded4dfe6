"""Structured output: texts match their constraints through all changes of the instances."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from degenerate_cases import DEGENERATE, REFUSED
from harness import engine_of, in_dispatcher, registry_of
from pausing_cases import done, expected_of, outputs, submit
from serving_checks import TIMEOUT_S, check_idle, forget_prefixes
from structured_cases import KINDS, PERSONS, PROMPT, TABLE, drawn, random_schema, valid_against
from transform_cases import tokens

from amoeba_jax import LLM, StructuredOutput
from amoeba_jax.engine.steps import MAX_PENDING_STEPS
from amoeba_jax.errors import RequestError
from amoeba_jax.instances.sequence import SequenceState
from amoeba_jax.sampling.structured import GrammarCompiler
from amoeba_jax.transform.options import PlacementOptions, TransformOptions

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]


SIZES: dict[str, Any] = {
    "num_devices": 2,
    "device_memory": "64MiB",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 8,
    "offload_memory": "64MiB",
    "progress": False,
}


@pytest.fixture(scope="module")
def llm(shared_data: Path, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with 2 x TP1 of a model with a SentencePiece vocabulary of 512 tokens."""
    with LLM(shared_data / "models" / "stories260K", **SIZES, compile_cache=compile_cache) as llm:
        yield llm


Tokens = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> Tokens:
    """Return the tokens of `KINDS` without a disturbance."""
    return expected_of(llm, KINDS)


@pytest.mark.slow
def test_every_complete_text_matches_its_constraint(llm: LLM):
    """The temperature is 1. The model knows no JSON, so only the constraint leads to a match."""
    answers = llm.generate([PROMPT] * len(TABLE), [drawn(structured, max_tokens=70) for structured, _ in TABLE])
    complete = 0
    for (structured, check), answer in zip(TABLE, answers, strict=True):
        (output,) = answer.outputs
        if output.finish_reason == "stop":
            complete += 1
            check(output.text)
        else:
            assert output.finish_reason == "length", (structured, answer.error)
    assert complete >= 0.7 * len(TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_500_schemas_lead_to_valid_texts(llm: LLM, part: int):
    """The schemas run in ten parts, at temperature 1. Each complete text must be valid."""
    random = np.random.default_rng(1)
    schemas = [random_schema(random) for _ in range(500)][part * 50 : part * 50 + 50]
    params = [drawn(StructuredOutput(json_schema=it), seed=i, max_tokens=200) for i, it in enumerate(schemas)]
    answers = llm.generate([PROMPT] * 50, params)
    complete = 0
    for schema, answer in zip(schemas, answers, strict=True):
        (output,) = answer.outputs
        assert output.finish_reason in ("stop", "length"), (schema, answer.error)
        if output.finish_reason == "stop":
            complete += 1
            valid_against(schema)(output.text)
    assert complete >= 35


def test_a_cut_text_is_the_beginning_of_a_match(llm: LLM):
    (answer,) = llm.generate(PROMPT, drawn(StructuredOutput(regex="[ab]{30}"), max_tokens=4))
    (output,) = answer.outputs
    assert output.finish_reason == "length"
    assert set(output.text) <= {"a", "b"}
    assert len(output.token_ids) == 4


def test_columns_of_logits_without_a_token_are_never_allowed(llm: LLM):
    """Many models have more logits than their tokenizer has tokens."""
    assert llm.tokenizer is not None
    size, anything = llm.tokenizer.vocab_size, StructuredOutput(regex=r"(.|\n)*")
    matcher = GrammarCompiler(llm.tokenizer, size + 70, llm.tokenizer.eos_token_ids).compile(anything)
    for token in llm.tokenizer.encode(PROMPT, add_special_tokens=False):
        allowed = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
        assert allowed[token]
        assert len(allowed) >= size + 70
        assert not allowed[size:].any()
        matcher.advance(token)


def test_samples_of_a_request_have_matchers_of_their_own(llm: LLM):
    (together,) = llm.generate(PROMPT, drawn(PERSONS, n=3))
    alone = [llm.generate(PROMPT, drawn(PERSONS, seed=5 + i))[0].outputs[0].token_ids for i in range(3)]
    assert [output.token_ids for output in together.outputs] == alone
    assert len(set(alone)) == 3


def launch(llm: LLM) -> None:
    """Launch as many steps as may be in flight."""
    for _ in range(MAX_PENDING_STEPS):
        engine_of(llm).advance()


def turn(llm: LLM) -> None:
    """Run one turn of the loop. One of the two steps in flight ends, so no instance runs out of work."""
    engine = engine_of(llm)
    launch(llm)
    for instance in engine.cluster.all_instances:
        if instance.pending:
            instance.pending[0].result.exception(TIMEOUT_S)
    engine.collect()


def change(llm: LLM, future: Future[Any]) -> None:
    """Run turns of the loop until a change is done."""
    engine = engine_of(llm)
    while not future.done():
        if engine.changes.awaits_programs:
            engine.cluster.executables.background.wait()
        turn(llm)
        engine.changes.wait()
    future.result()
    for _ in range(3):
        turn(llm)


def merge_and_split(llm: LLM) -> None:
    for degree in (2, 1):
        change(llm, engine_of(llm).transform(TransformOptions(degree, (0, 1), layers_per_step=1)))


def pause_and_resume(llm: LLM) -> None:
    engine = engine_of(llm)
    for degree in (2, 1):
        what = TransformOptions(degree, (0, 1), release_weights=False, running="pause")
        change(llm, engine.transform(what))
        assert bool(engine.num_paused) == (degree == 2)


def migrate(llm: LLM) -> None:
    for device in (1, 0):
        change(llm, engine_of(llm).changes.request(PlacementOptions("migrate", device, layers=range(3, 5))))


def replicate(llm: LLM) -> None:
    for kind in ("replicate", "evict"):
        change(llm, engine_of(llm).changes.request(PlacementOptions(kind, 1, layers=range(3, 5))))


def preempt(llm: LLM) -> None:
    engine = engine_of(llm)
    for sequence in engine.sequences.running:
        engine.sequences.preempt(engine.cluster.instance_of(sequence), sequence)


def offload(llm: LLM) -> None:
    engine = engine_of(llm)
    offloaded = engine.sequences.running
    for sequence in offloaded:
        engine.admission.offload(sequence)
    assert {sequence.state for sequence in offloaded} == {SequenceState.OFFLOADED}


def constrained_steps(llm: LLM) -> int:
    """Return the number of steps in flight whose sampling waits for matchers."""
    return sum(step.logits is not None for instance in engine_of(llm).instances for step in instance.pending)


@pytest.mark.parametrize(
    "disturb",
    [
        merge_and_split,
        preempt,
        pytest.param(pause_and_resume, marks=pytest.mark.slow),
        pytest.param(offload, marks=pytest.mark.slow),
        pytest.param(migrate, marks=pytest.mark.slow),
        pytest.param(replicate, marks=pytest.mark.slow),
    ],
)
def test_changes_do_not_disturb_constrained_requests(llm: LLM, expected: Tokens, disturb: Callable[[LLM], None]):
    check_undisturbed(llm, expected, disturb)


def check_undisturbed(llm: LLM, expected: Tokens, disturb: Callable[[LLM], None]) -> None:
    def drive() -> None:
        requests = submit(llm, KINDS)
        while not all(len(s.output) >= 3 for r in requests for s in r.sequences):
            turn(llm)
        launch(llm)
        assert constrained_steps(llm)
        disturb(llm)
        while not done(requests):
            turn(llm)
        assert outputs(requests) == expected
        registry_of(llm).end(requests)

    in_dispatcher(llm, drive)
    forget_prefixes(llm)
    check_idle(llm)


@pytest.mark.slow
def test_new_instances_take_over_constrained_requests(shared_data: Path, compile_cache: str):
    """A device joins and leaves again."""

    def scale(llm: LLM) -> None:
        for kind in ("scale_out", "scale_in"):
            change(llm, engine_of(llm).changes.request(PlacementOptions(kind, 1)))
            assert len(engine_of(llm).instances) == (2 if kind == "scale_out" else 1)

    one = {"head": [0], "stages": [{"layers": [0, 5], "homes": [[0]]}]}
    with LLM(
        shared_data / "models" / "stories260K",
        **SIZES | {"max_num_seqs": 8},
        placement=one,
        compile_cache=compile_cache,
    ) as llm:
        check_undisturbed(llm, expected_of(llm, KINDS), scale)


@pytest.mark.slow
def test_a_slot_is_free_although_its_last_step_awaits_its_matcher(llm: LLM):
    """Each constrained sequence ends before a step in flight samples its token. Other sequences take its slot."""
    penalized = [drawn(None, seed=i, repetition_penalty=1.3, max_tokens=12) for i in range(8)]
    undisturbed = tokens(llm.generate([PROMPT] * 8, penalized))
    forget_prefixes(llm)

    def drive() -> None:
        ended, engine = submit(llm, [(PROMPT, drawn(PERSONS, seed=i)) for i in range(8)]), engine_of(llm)
        while not all(s.output for r in ended for s in r.sequences):
            turn(llm)
        requests = submit(llm, [(PROMPT, params) for params in penalized])
        launch(llm)
        assert constrained_steps(llm) == 2
        engine.sequences.finish([s for r in ended for s in r.sequences], "abort")
        engine.advance()
        assert all(s.slot >= 0 for r in requests for s in r.sequences)
        assert constrained_steps(llm) == 2
        while not done(requests):
            turn(llm)
        assert outputs(requests) == undisturbed
        registry_of(llm).end([*ended, *requests])

    in_dispatcher(llm, drive)
    forget_prefixes(llm)
    check_idle(llm)


def test_a_failed_step_takes_the_step_that_awaits_its_tokens_along(llm: LLM, expected: Tokens):
    def drive() -> None:
        engine, requests = engine_of(llm), submit(llm, KINDS)
        while not all(len(s.output) >= 3 for r in requests for s in r.sequences):
            turn(llm)
        launch(llm)
        awaiting = [instance.pending[1] for instance in engine.instances]
        assert all(step.logits is not None for step in awaiting)
        for instance in engine.instances:
            instance.pending[0].result = failed = Future[Any]()
            failed.set_exception(RuntimeError("injected"))
        engine.collect()
        assert all(step.result.exception(0) is not None for step in awaiting)
        while not done(requests):
            turn(llm)
        assert outputs(requests) == expected
        registry_of(llm).end(requests)

    in_dispatcher(llm, drive)
    forget_prefixes(llm)
    check_idle(llm)


@pytest.mark.slow
def test_constrained_rows_take_part_in_every_step(llm: LLM):
    """Other rows share the steps, and constrained rows need no further steps."""
    asked = [(PROMPT, drawn(StructuredOutput(regex="[a-z ]{90}"), max_tokens=20)), (PROMPT, drawn(None, max_tokens=20))]

    def drive() -> int:
        before, requests = engine_of(llm).stats.steps, submit(llm, asked * 2)
        while not done(requests):
            turn(llm)
        registry_of(llm).end(requests)
        return engine_of(llm).stats.steps - before

    assert in_dispatcher(llm, drive) <= 2 * 22, "two instances"
    check_idle(llm)


def test_a_sequence_without_an_allowed_token_fails_alone(llm: LLM):
    token = llm.tokenizer.encode("x", add_special_tokens=False)[-1]  # type: ignore[union-attr]
    stuck = drawn(StructuredOutput(choice=["yes"]), allowed_token_ids=[token])
    expected = [llm.generate(PROMPT, params)[0].outputs[0].token_ids for params in (KINDS[0][1], KINDS[3][1])]
    answers = llm.generate([PROMPT] * 3, [KINDS[0][1], stuck, KINDS[3][1]])
    assert [answer.outputs[0].token_ids for answer in answers[::2]] == expected
    with pytest.raises(RequestError, match="leaves no token to generate after 0 tokens"):
        llm.generate(PROMPT, stuck)
    check_idle(llm)


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=range(len(REFUSED)))
def test_degenerate_constraints_are_refused_with_a_reason(llm: LLM, fields: dict, message: str):
    with pytest.raises(RequestError, match=message):
        llm.generate(PROMPT, drawn(StructuredOutput(**fields)))


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_100_degenerate_constraints_leave_their_neighbours_alone(llm: LLM):
    """Each is refused, or its request ends with an error or after its last token."""
    neighbours = [params for _, params in KINDS if params.n == 1]
    expected = [llm.generate(PROMPT, params)[0].outputs[0].token_ids for params in neighbours]
    found, all_done = list[list[Any]](), threading.Event()

    def live() -> None:
        while not all_done.is_set():
            answers = llm.generate([PROMPT] * len(neighbours), neighbours)
            found.append([answer.outputs[0].token_ids for answer in answers])

    def ask(fields: dict[str, Any]) -> str:
        try:
            (answer,) = llm.generate(PROMPT, drawn(StructuredOutput(**fields), max_tokens=40))
        except RequestError as error:
            return str(error)
        assert answer.error is not None or answer.outputs[0].finish_reason in ("stop", "length")
        return ""

    assert len(DEGENERATE) >= 100
    with ThreadPoolExecutor(3) as pool:
        beside = pool.submit(live)
        try:
            refused = [bool(message) for message in pool.map(ask, DEGENERATE)]
        finally:
            all_done.set()
        beside.result(TIMEOUT_S)
    assert found
    assert all(answer == expected for answer in found)
    assert 0 < sum(refused) < len(refused), "some are only slow"
    check_idle(llm)


def test_other_settings_apply_to_constrained_requests(llm: LLM):
    digits = StructuredOutput(regex="[0-9]{6}|[0-9]+x")
    (plain,) = llm.generate(PROMPT, drawn(StructuredOutput(regex="[a-z]*"), min_tokens=12, max_tokens=30))
    assert len(plain.outputs[0].token_ids) >= 12, "the grammar allows the end at once"
    (short,) = llm.generate(PROMPT, drawn(StructuredOutput(choice=["a"]), min_tokens=12, ignore_eos=True))
    assert (short.outputs[0].text, short.outputs[0].finish_reason) == ("a", "stop")
    (banned,) = llm.generate(PROMPT, drawn(digits, bad_words=["x", *"012345678"]))
    assert banned.outputs[0].text == "999999"
    (stopped,) = llm.generate(PROMPT, drawn(StructuredOutput(regex="abcdef"), stop=["de"]))
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("abc", "de")
    (logged,) = llm.generate(PROMPT, drawn(StructuredOutput(choice=["a"]), logprobs=1))
    (first,) = logged.outputs[0].logprobs or ()
    assert first[logged.outputs[0].token_ids[0]].rank > 1, "probabilities are those without the constraint"
    check_idle(llm)
