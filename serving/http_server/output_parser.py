"""Separation of generated text into content, reasoning and tool calls."""

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers.utils.chat_parsing import ResponseParser

Kind = Literal["content", "reasoning", "call"]

_CHATML = "<|im_start|>assistant\n"
# Reasoning of Qwen3, without the newlines around it. Unlimited repetitions would cost time quadratic in the newlines.
_THINK = {"open_pattern": r"<think>\n{0,4}", "close_pattern": r"\n{0,4}</think>\n{0,4}"}


@dataclass(frozen=True)
class Family:
    """Output format of a family of models: the marks of content, reasoning and tool calls in generated text.

    A region is a part of the text, described by a dict as in `transformers.utils.chat_parsing`.

    Attributes:
        anchor: text that starts an answer.
        content: region of the content. Empty: all text outside the other regions.
        reasoning: region of the reasoning. None: the format has no reasoning.
        calls: regions of tool calls. If the pattern of a region captures the `name` of the function, the text of the
            region is the arguments. If it captures no name, `read_calls` reads the text.
        call_marks: marks before and after a tool call. A tool call that cannot be read becomes content, with its marks.
        uses_special_tokens: whether the marks are special tokens. If so, the text must keep special tokens.
    """

    anchor: str
    content: Mapping[str, Any]
    reasoning: Mapping[str, Any] | None
    calls: tuple[Mapping[str, Any], ...]
    call_marks: tuple[str, str] = ("", "")
    uses_special_tokens: bool = False

    def template(self, has_tools: bool, reasons: bool) -> dict[str, Any]:
        """Return the specification of this format for the parser of `transformers`."""
        fields: dict[str, Any] = {"content": dict(self.content)}
        if reasons and self.reasoning is not None:
            fields["reasoning"] = dict(self.reasoning)
        if has_tools:
            fields |= {f"call {number}": dict(it) | {"repeats": True} for number, it in enumerate(self.calls)}
        return {"start_anchor": self.anchor, "fields": fields}


HERMES = Family(
    _CHATML,
    {},
    _THINK,
    ({"open_pattern": r"\n{0,4}<tool_call>\s{0,16}", "close_pattern": r"\s{0,16}</tool_call>\n{0,4}"},),
    ("<tool_call>\n", "\n</tool_call>"),
)
LLAMA3 = Family(
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    {},
    None,
    ({"open_pattern": r"\A\s{0,16}(?=\{)|<\|python_tag\|>"},),
    uses_special_tokens=True,
)
MISTRAL = Family(
    "[/INST]",
    {},
    {"open_pattern": r"\[THINK\]", "close_pattern": r"\[/THINK\]"},
    ({"open": "[TOOL_CALLS]"},),
    ("[TOOL_CALLS]", ""),
    uses_special_tokens=True,
)
_START = r"(?:<\|start\|>assistant)?"
_NAMED = {"close_pattern": r"<\|(?:call|end)\|>", "transform": {"name": "{name}", "arguments": "{content}"}}
_FORMAT = r" ?(?:<\|constrain\|>)?\w*<\|message\|>"
GPT_OSS = Family(
    "<|start|>assistant",
    {
        "open_pattern": _START + r"<\|channel\|>(?:final|commentary)" + _FORMAT,
        "close_pattern": r"<\|(?:end|return)\|>",
    },
    {"open_pattern": _START + r"<\|channel\|>analysis<\|message\|>", "close_pattern": r"<\|end\|>"},
    (
        {"open_pattern": _START + r" to=functions\.(?P<name>[\w-]+)<\|channel\|>\w+" + _FORMAT, **_NAMED},
        {"open_pattern": _START + r"<\|channel\|>\w+ to=functions\.(?P<name>[\w-]+)" + _FORMAT, **_NAMED},
    ),
    uses_special_tokens=True,
)


def family_of(template: str) -> Family:
    """Return the output format of the model with this chat template."""
    if "<|channel|>" in template:
        return GPT_OSS
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA3 if "<|start_header_id|>" in template else HERMES


def reasons(template: str) -> bool:
    """Return whether the model with this chat template marks its reasoning in the text."""
    return any(mark in template for mark in ("<think>", "[THINK]", "<|channel|>"))


@dataclass(frozen=True)
class Piece:
    """Next part of an answer. The part belongs to the content, to the reasoning or to a tool call.

    Attributes:
        kind: kind of output to which the part belongs.
        text: next part of the content, of the reasoning, or of the arguments of a tool call.
        index: index of the tool call in the answer.
        call_id: id of the tool call, in the first part of a tool call only.
        name: name of the function, in the first part of a tool call only.
    """

    kind: Kind
    text: str
    index: int = 0
    call_id: str | None = None
    name: str | None = None


class OutputParser:
    """Parser that divides the text of one answer into content, reasoning and tool calls while the text arrives.

    Args:
        family: output format of the model.
        prompt: last part of the prompt's text. Some prompts end with the mark that starts the reasoning.
        has_tools: whether the model may call tools.
        reasons: whether to separate reasoning.
        forced: name of the function that the model must call. The whole text is then the arguments of the call. If
            "*", the whole text is a JSON list of calls. If None, the text may have content, reasoning and calls.
        most_calls: largest number of tool calls to return. Further calls are dropped.
    """

    def __init__(
        self,
        family: Family,
        prompt: str,
        has_tools: bool,
        reasons: bool,
        forced: str | None = None,
        most_calls: int = 1024,
    ):
        self._family, self._forced, self._most_calls = family, forced, most_calls
        self._held: list[str] = []
        self.num_calls = 0
        self.is_reasoning = False
        self._parser: ResponseParser | None = None
        self._call: list[str] | None = None  # text of the open tool call
        special = family.uses_special_tokens and bool(family.content)
        if forced is None and (has_tools or reasons or special):
            start = prompt.rfind(family.anchor)
            prefix = "" if start < 0 else prompt[start:]
            self._parser = ResponseParser(family.template(has_tools, reasons), prefix)
            self.is_reasoning = bool(self._parser.initial_events) and _is_open(self._parser.initial_events, "reasoning")

    def feed(self, text: str) -> list[Piece]:
        """Add new text. Return the new parts of the answer. A later call may return the end of `text`."""
        if not text:
            return []
        if self._forced == "*":
            self._held.append(text)
            return []
        if self._forced is not None:
            return [self._argument(text)]
        if self._parser is None:
            return [Piece("content", text)]
        return self._pieces(self._parser.feed(text))

    def finish(self) -> list[Piece]:
        """End the answer. Return the parts of the answer that `feed` has held back."""
        if self._forced == "*":
            text = "".join(self._held)
            return self._calls(text, text)
        if self._forced is not None:
            return [] if self.num_calls else [self._argument("")]
        if self._parser is None:
            return []
        _, events = self._parser.finalize()
        # The parser closes an incomplete region as if it were complete.
        is_cut = self._call is not None
        return self._pieces(events, is_cut)

    def _argument(self, text: str) -> Piece:
        if self.num_calls:
            return Piece("call", text)
        self.num_calls = 1
        return Piece("call", text, 0, self._new_id(), self._forced)

    def _new_id(self) -> str:
        # Mistral's templates want nine characters.
        return uuid.uuid4().hex[:9] if self._family is MISTRAL else f"call_{uuid.uuid4().hex[:24]}"

    def _pieces(self, events: list[dict[str, Any]], is_cut: bool = False) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            field, kind = event["field"], event["type"]
            if field.startswith("call"):
                if kind == "region_open":
                    self._call = []
                elif kind == "region_chunk":
                    assert self._call is not None
                    self._call.append(event["text"])
                else:
                    pieces += self._close_call(event["value"], is_cut)
            else:
                self.is_reasoning = field == "reasoning" and kind != "region_close"
                if kind == "region_chunk":
                    pieces.append(Piece("reasoning" if field == "reasoning" else "content", event["text"]))
        return pieces

    def _close_call(self, value: Any, is_cut: bool) -> list[Piece]:
        body, self._call = "".join(self._call or ()), None
        before, after = self._family.call_marks
        if isinstance(value, Mapping):  # the name is part of the mark
            return [] if is_cut and not _is_json(body) else self._new_calls([(str(value["name"]), body.strip())])
        return self._calls(body, before + body + ("" if is_cut else after))

    def _calls(self, body: str, raw: str) -> list[Piece]:
        """Return the tool calls in `body`. If `body` is not a tool call, return the text `raw` as content."""
        calls = read_calls(body)
        if calls is None:
            return [Piece("content", raw)] if raw else []
        return self._new_calls(calls)

    def _new_calls(self, calls: list[tuple[str, str]]) -> list[Piece]:
        pieces = []
        for name, arguments in calls[: self._most_calls - self.num_calls]:
            pieces.append(Piece("call", arguments, self.num_calls, self._new_id(), name))
            self.num_calls += 1
        return pieces


def _is_open(events: list[dict[str, Any]], field: str) -> bool:
    last = events[-1]
    return last["field"] == field and last["type"] != "region_close"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


# Newer Mistral models: name[ARGS]{...}
_ARGS = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]")
_BETWEEN = re.compile(r"(?:\s|;|,|\[TOOL_CALLS\])*")


def read_calls(text: str) -> list[tuple[str, str]] | None:
    """Return the tool calls in a text, as pairs (name of the function, JSON arguments).

    Return None if the text has no call, or has anything besides calls.
    """
    decoder, calls, position = json.JSONDecoder(), [], 0
    try:
        while (position := _BETWEEN.match(text, position).end()) < len(text):  # type: ignore[union-attr]
            if (named := _ARGS.match(text, position)) is not None:
                arguments, position = decoder.raw_decode(text, named.end())
                values: list[Any] = [{"name": named[1], "arguments": arguments}]
            else:
                value, position = decoder.raw_decode(text, position)
                values = value if isinstance(value, list) else [value]
            for it in values:
                if (call := _read_call(it)) is None:
                    return None
                calls.append(call)
    except (ValueError, RecursionError):
        return None
    return calls or None


def _read_call(value: Any) -> tuple[str, str] | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return name, arguments
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
