"""Structured output: texts match their constraints, whatever happens to the instances meanwhile."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import engine_of, in_dispatcher, registry_of
from pausing_cases import done, expected_of, outputs, steps, submit
from serving_checks import TIMEOUT_S, check_idle, forget_prefixes
from structured_cases import PERSON, TABLE, random_schema, valid_against

from amoeba_jax import LLM, SamplingParams, StructuredOutput
from amoeba_jax.errors import RequestError
from amoeba_jax.instances.sequence import Sequence, SequenceState
from amoeba_jax.transform.options import TransformOptions

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

PROMPT = "Once upon a time"
PERSONS = StructuredOutput(json_schema=PERSON)


@pytest.fixture(scope="module")
def llm(shared_data: Path, compile_cache: str) -> Iterator[LLM]:
    """2 x TP1 of a model with a SentencePiece vocabulary of 512 tokens."""
    with LLM(
        shared_data / "models" / "stories260K",
        num_devices=2,
        device_memory="64MiB",
        max_num_seqs=4,
        max_num_batched_tokens=16,
        page_size=8,
        offload_memory="64MiB",
        compile_cache=compile_cache,
        progress=False,
    ) as llm:
        yield llm


def drawn(structured: StructuredOutput | None, **settings) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "seed": 5, "structured": structured} | settings)


def test_every_complete_text_matches_its_constraint(llm: LLM):
    """At temperature 1. The model knows no JSON, so that nothing but the constraint leads to a match."""
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
def test_500_schemas_lead_to_valid_texts(llm: LLM):
    random = np.random.default_rng(1)
    schemas = [random_schema(random) for _ in range(500)]
    params = [drawn(StructuredOutput(json_schema=it), seed=i, max_tokens=200) for i, it in enumerate(schemas)]
    answers = llm.generate([PROMPT] * 500, params)
    complete = 0
    for schema, answer in zip(schemas, answers, strict=True):
        (output,) = answer.outputs
        assert output.finish_reason in ("stop", "length"), (schema, answer.error)
        if output.finish_reason == "stop":
            complete += 1
            valid_against(schema)(output.text)
    assert complete >= 475


def test_a_cut_text_is_the_beginning_of_a_match(llm: LLM):
    (answer,) = llm.generate(PROMPT, drawn(StructuredOutput(regex="[ab]{30}"), max_tokens=4))
    (output,) = answer.outputs
    assert output.finish_reason == "length"
    assert set(output.text) <= {"a", "b"}
    assert len(output.token_ids) == 4


def test_samples_of_a_request_have_matchers_of_their_own(llm: LLM):
    (together,) = llm.generate(PROMPT, drawn(PERSONS, n=3))
    alone = [llm.generate(PROMPT, drawn(PERSONS, seed=5 + i))[0].outputs[0].token_ids for i in range(3)]
    assert [output.token_ids for output in together.outputs] == alone
    assert len(set(alone)) == 3


KINDS = [
    (PROMPT, drawn(PERSONS)),
    (PROMPT, drawn(StructuredOutput(json_object=True), repetition_penalty=1.2, max_tokens=60)),
    (PROMPT, drawn(StructuredOutput(regex="([a-z]{1,5} ){20}"), n=2)),
    (PROMPT, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)),
    (PROMPT, drawn(StructuredOutput(regex="[a-z ]{90}"), temperature=0, logprobs=2)),
]


def merge_and_split(llm: LLM) -> None:
    engine = engine_of(llm)
    for degree in (2, 1):
        future = engine.transform(TransformOptions(degree, (0, 1), layers_per_step=1))
        engine.end_transformations()
        future.result()
        steps(llm, new_tokens(llm))


def pause_and_resume(llm: LLM) -> None:
    engine = engine_of(llm)
    for degree in (2, 1):
        future = engine.transform(TransformOptions(degree, (0, 1), release_weights=False, running="pause"))
        engine.end_transformations()
        future.result()
        assert bool(engine.num_paused) == (degree == 2)


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


def new_tokens(llm: LLM) -> Callable[[], bool]:
    """Return a condition that holds when two more tokens of a sequence are known."""
    running: list[Sequence] = engine_of(llm).sequences.running
    before = [len(sequence.output) for sequence in running]
    return lambda: any(s.finished or len(s.output) > n + 1 for s, n in zip(running, before, strict=True))


@pytest.mark.parametrize(
    "disturb",
    [
        merge_and_split,
        preempt,
        pytest.param(pause_and_resume, marks=pytest.mark.slow),
        pytest.param(offload, marks=pytest.mark.slow),
    ],
)
def test_changes_do_not_disturb_constrained_requests(llm: LLM, disturb: Callable[[LLM], None]):
    expected = expected_of(llm, KINDS)

    def drive() -> None:
        requests = submit(llm, KINDS)
        steps(llm, lambda: all(len(s.output) >= 3 for r in requests for s in r.sequences))
        engine_of(llm).advance()  # with a step in flight
        disturb(llm)
        steps(llm, lambda: done(requests))
        assert outputs(requests) == expected
        registry_of(llm).end(requests)

    in_dispatcher(llm, drive)
    forget_prefixes(llm)
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


DEEP = range(300)
DEGENERATE = [
    ({"json_schema": {"not": {}}}, r'Unimplemented keys: \["not"\]'),
    ({"json_schema": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}}, "oneOf constraints are not supported"),
    ({"json_schema": {"type": "string", "format": "unheard-of"}}, "Unknown format: unheard-of"),
    ({"json_schema": {"$ref": "https://example.com/schema"}}, "example.com/schema"),
    ({"json_schema": {"type": "whole"}}, "Invalid type: whole"),
    ({"json_schema": "false"}, "allows no text"),
    ({"json_schema": {"$ref": "#"}}, "allows no text"),
    (
        {
            "json_schema": {
                "$defs": {
                    f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i + k) % 300}"} for k in (1, 7)]} for i in range(300)
                },
                "$ref": "#/$defs/d0",
            }
        },
        "too complex",
    ),
    ({"json_schema": {"allOf": [{"anyOf": [{"const": i}, {"const": -i}]} for i in range(60)]}}, "cannot be used"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"regex": "(" * 20_000 + "a" + ")" * 20_000}, "maximum number of nested"),
    ({"grammar": "start: missing"}, 'unknown name: "missing"'),
    ({"grammar": "start: " + "(" * 2_000 + '"a"' + ")" * 2_000}, "too deeply nested"),
    (
        {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(3_000)) + '\na3000: "x"'},
        "too complex",
    ),
]


@pytest.mark.parametrize(("fields", "message"), DEGENERATE, ids=range(len(DEGENERATE)))
def test_degenerate_constraints_are_refused_with_a_reason(llm: LLM, fields: dict, message: str):
    with pytest.raises(RequestError, match=message):
        llm.generate(PROMPT, drawn(StructuredOutput(**fields)))


@pytest.mark.slow
def test_slow_and_endless_grammars_leave_their_neighbours_alone(llm: LLM):
    """Each grammar ends its own request at most: with an error, or after its last token."""
    slow = [
        StructuredOutput(grammar="start: " + '"' + "x" * 100_000 + '"'),
        StructuredOutput(
            grammar="start: a0\n" + "\n".join(f"a{i}: a{i + 1} | a{i + 1} a{i + 1} |" for i in range(30)) + '\na30: "x"'
        ),
        StructuredOutput(regex="(.*[ab]){50}(x|y){3,60}z"),
        StructuredOutput(json_schema={}),
        StructuredOutput(json_schema={"type": "string", "minLength": 50_000}),
    ]
    neighbours = [params for _, params in KINDS if params.n == 1]
    expected = [llm.generate(PROMPT, params)[0].outputs[0].token_ids for params in neighbours]
    answers = llm.generate([PROMPT] * 9, [*(drawn(it, max_tokens=40) for it in slow), *neighbours])
    assert [answer.outputs[0].token_ids for answer in answers[5:]] == expected
    for answer in answers[:5]:
        assert answer.error is not None or answer.outputs[0].finish_reason in ("stop", "length")
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
