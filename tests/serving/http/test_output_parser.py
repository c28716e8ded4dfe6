"""Content, reasoning and tool calls in the output formats of several families."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.http_server.output_parser import (
    GPT_OSS,
    HERMES,
    LLAMA3,
    MISTRAL,
    Family,
    OutputParser,
    Piece,
    family_of,
    read_calls,
)

CHATML = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"
HARMONY = "<|start|>user<|message|>hi<|end|><|start|>assistant"
OSLO, ROME = '{"city": "Oslo"}', '{"city": "Rome"}'
Calls = list[tuple[str, str]]

CASES: list[tuple[Family, str, str, str, str, Calls]] = [
    # family, prompt, text -> content, reasoning, calls
    (HERMES, CHATML, "plain text", "plain text", "", []),
    (HERMES, CHATML, "<think>\nhm\nso\n</think>\n\nplain", "plain", "hm\nso", []),
    (HERMES, CHATML + "<think>\n", "hm\n</think>\n\nplain", "plain", "hm", []),
    (HERMES, CHATML + "<think>\n\n</think>\n\n", "plain", "plain", "", []),
    (HERMES, CHATML, "<think>\nhm", "", "hm", []),
    (
        HERMES,
        CHATML,
        '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "",
        "",
        [("f", OSLO)],
    ),
    (
        HERMES,
        CHATML,
        'look\n<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"city": "Rome"}}\n</tool_call>',
        "look",
        "",
        [("f", OSLO), ("g", ROME)],
    ),
    (
        HERMES,
        CHATML,
        "<think>\nhm\n</think>\n\n"
        '<tool_call>[{"name": "f", "arguments": {"city": "Oslo"}}, {"name": "g", "arguments": {}}]</tool_call>',
        "",
        "hm",
        [("f", OSLO), ("g", "{}")],
    ),
    # A complete call without its end mark is a call. A truncated call stays text.
    (HERMES, CHATML, '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}', "", "", [("f", OSLO)]),
    (HERMES, CHATML, '<tool_call>\n{"name": "f", "argum', '<tool_call>\n{"name": "f", "argum', "", []),
    (HERMES, CHATML, "<tool_call>no</tool_call>!", "<tool_call>\nno\n</tool_call>!", "", []),
    (HERMES, CHATML, "a <tool b", "a <tool b", "", []),
    (LLAMA3, LLAMA, '{"name": "f", "parameters": {"city": "Oslo"}}', "", "", [("f", OSLO)]),
    (
        LLAMA3,
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {"city": "Oslo"}}; {"name": "g", "parameters": {}}',
        "",
        "",
        [("f", OSLO), ("g", "{}")],
    ),
    (LLAMA3, LLAMA, 'no: {"name": "f"}', 'no: {"name": "f"}', "", []),
    (LLAMA3, LLAMA, '{"answer": 42}', '{"answer": 42}', "", []),
    (MISTRAL, "[INST] hi[/INST]", '[TOOL_CALLS][{"name": "f", "arguments": {"city": "Oslo"}}]', "", "", [("f", OSLO)]),
    (
        MISTRAL,
        "[INST]hi[/INST]",
        'look[TOOL_CALLS]f[ARGS]{"city": "Oslo"}[TOOL_CALLS]g[ARGS]{"city": "Rome"}',
        "look",
        "",
        [("f", OSLO), ("g", ROME)],
    ),
    (MISTRAL, "[INST]hi[/INST]", "[THINK]hm[/THINK]plain", "plain", "hm", []),
    (
        GPT_OSS,
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>plain",
        "plain",
        "hm",
        [],
    ),
    (
        GPT_OSS,
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"city": "Oslo"}',
        "",
        "hm",
        [("f", OSLO)],
    ),
    (
        GPT_OSS,
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
        '<|message|>{"city": "Oslo"}<|call|>',
        "",
        "hm",
        [("f", OSLO)],
    ),
]


def parse(family: Family, prompt: str, pieces_of_text: list[str]) -> list[Piece]:
    parser = OutputParser(family, prompt, has_tools=True, reasons=True)
    return [piece for text in pieces_of_text for piece in parser.feed(text)] + parser.finish()


def summary(pieces: list[Piece]) -> tuple[str, str, Calls]:
    text = {kind: "".join(it.text for it in pieces if it.kind == kind) for kind in ("content", "reasoning")}
    calls = [it for it in pieces if it.kind == "call"]
    assert [it.index for it in calls] == list(range(len(calls)))
    assert len({it.call_id for it in calls}) == len(calls)
    return text["content"], text["reasoning"], [(str(it.name), it.text) for it in calls]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[2][:40])
def test_text_is_separated(case: tuple[Family, str, str, str, str, Calls]):
    family, prompt, text, content, reasoning, calls = case
    assert summary(parse(family, prompt, [text])) == (content, reasoning, calls)
    assert summary(parse(family, prompt, list(text))) == (content, reasoning, calls)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_split_of_the_text_changes_nothing(case: tuple[Family, str, str, str, str, Calls], data: st.DataObject):
    """The text may be truncated at any place."""
    family, prompt, whole = case[:3]
    text = whole[: data.draw(st.integers(1, len(whole)))]
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})
    parts = [text[start:stop] for start, stop in pairwise(places)]
    assert summary(parse(family, prompt, parts)) == summary(parse(family, prompt, [text]))


def test_without_tools_calls_are_text():
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parser = OutputParser(HERMES, CHATML, has_tools=False, reasons=False)
    assert summary(parser.feed(text) + parser.finish()) == (text, "", [])


def test_forced_call_streams_its_arguments():
    parser = OutputParser(HERMES, CHATML, has_tools=True, reasons=True, forced="f")
    pieces = [piece for text in OSLO for piece in parser.feed(text)] + parser.finish()
    assert "".join(piece.text for piece in pieces) == OSLO
    assert [piece.name for piece in pieces] == ["f"] + [None] * (len(OSLO) - 1)


def test_required_calls_are_a_list():
    text = json.dumps([{"name": "f", "arguments": {"city": "Oslo"}}, {"name": "g", "arguments": {}}])
    for most, expected in ((1, 1), (8, 2)):
        parser = OutputParser(HERMES, CHATML, has_tools=True, reasons=False, forced="*", most_calls=most)
        assert parser.feed(text) == []
        assert len(summary(parser.finish())[2]) == expected
    parser = OutputParser(HERMES, CHATML, has_tools=True, reasons=False, forced="*")
    parser.feed(text[:20])
    assert summary(parser.finish()) == (text[:20], "", [])


@pytest.mark.parametrize("text", ["", "[]", "1", "null", '{"name": 1}', '[{"name": "f"}, 2]', "[" * 100_000])
def test_what_is_no_call_is_not_read(text: str):
    assert read_calls(text) is None


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("<|start|>assistant<|channel|>final", GPT_OSS),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", MISTRAL),
        ("<|start_header_id|>", LLAMA3),
        ("<|im_start|>", HERMES),
    ],
)
def test_template_tells_the_family(template: str, family: Family):
    assert family_of(template) is family
