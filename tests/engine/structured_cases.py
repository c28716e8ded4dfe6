"""Constraints of many kinds, with independent checks of complete texts."""

import json
import re
from collections.abc import Callable
from datetime import date
from typing import Any

import jsonschema
import numpy as np

from amoeba_jax import SamplingParams, StructuredOutput

Check = Callable[[str], object]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None, 7]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"kids": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}}},
    "required": ["kids"],
    "additionalProperties": False,
}
PROMPT = "Once upon a time"
PERSONS = StructuredOutput(json_schema=PERSON)


def drawn(structured: StructuredOutput | None, **settings) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "seed": 5, "structured": structured} | settings)


KINDS = [
    (PROMPT, drawn(PERSONS)),
    (PROMPT, drawn(StructuredOutput(json_object=True), repetition_penalty=1.2, max_tokens=60)),
    (PROMPT, drawn(StructuredOutput(regex="([a-z]{1,5} ){20}"), n=2)),
    (PROMPT, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)),
    (PROMPT, drawn(StructuredOutput(regex="[a-z ]{90}"), temperature=0, logprobs=2)),
]
"""Requests of every kind that a change may disturb."""
SCHEMAS: list[Any] = [
    PERSON,
    {"type": "integer", "minimum": -5, "maximum": 99},
    {"type": "number", "maximum": 2e10, "minimum": 0, "multipleOf": 0.5},
    {"type": "string", "pattern": "^[a-c]+$", "maxLength": 5, "minLength": 2},
    {"type": "string", "format": "date"},
    {"enum": ["x", 1, True, None, {"k": [1]}]},
    {"const": {"a": 'é\n"\\'}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "null"}, {"const": 3}], "items": False, "minItems": 2},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9, "minimum": 0}, "maxProperties": 2},
    {"type": ["integer", "null"], "maximum": 1000, "minimum": 0},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False},
]


FORMATS = jsonschema.FormatChecker(["ipv4", "uuid"])
"""Formats of JSON schema 2020-12. The `time` of `FormatChecker` is from draft 3, without fractions and offsets."""
_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)"


@FORMATS.checks("date")
def is_date(value: object) -> bool:
    """Return whether a text is a date of RFC 3339. Its leap year 0 does not exist in Python."""
    if not isinstance(value, str):
        return True
    if re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII) is None:
        return False
    try:
        date.fromisoformat(value.replace("0000-", "2000-", 1))
    except ValueError:
        return False
    return True


@FORMATS.checks("time")
def is_time(value: object) -> bool:
    """Return whether a text is a time of RFC 3339."""
    return not isinstance(value, str) or re.fullmatch(_TIME, value, re.ASCII | re.IGNORECASE) is not None


@FORMATS.checks("date-time")
def is_date_time(value: object) -> bool:
    """Return whether a text is a date and a time of RFC 3339."""
    if not isinstance(value, str):
        return True
    return is_date(value[:10]) and value[10:11] in ("T", "t") and is_time(value[11:])


def valid_against(schema: Any) -> Check:
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    return lambda text: validator.validate(json.loads(text))


def matches(pattern: str) -> Check:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


def one_of(choices: list[str]) -> Check:
    def check(text: str) -> None:
        assert text in choices

    return check


CHOICES = ["yes", "no", 'yes, but "later"\n', "né"]
REGEX = "[a-z]{2,6}( [0-9]{1,3})?"
OTHERS: list[tuple[StructuredOutput, Check]] = [
    (StructuredOutput(json_object=True), valid_against({"type": "object"})),
    (StructuredOutput(regex=REGEX), matches(REGEX)),
    (StructuredOutput(choice=CHOICES), one_of(CHOICES)),
    (StructuredOutput(grammar='start: item ("," item)*\nitem: "<" /[a-z]/ ">"'), matches("<[a-z]>(,<[a-z]>)*")),
]
TABLE = [(StructuredOutput(json_schema=schema), valid_against(schema)) for schema in SCHEMAS] + OTHERS


_PLAIN = ["integer", "multiple", "number", "string", "pattern", "format", "enum", "const", "boolean", "null", "any"]
_COMPOUND = ["object", "map", "array", "tuple", "anyOf", "allOf", "types", "tree"]


def random_schema(random: np.random.Generator) -> dict[str, Any]:
    """Return a schema of supported keywords. Most of its texts are short."""
    return _random_schema(random, 2) | {"$defs": {"tree": TREE}}


def _random_schema(random: np.random.Generator, depth: int) -> dict[str, Any]:
    def one(values: list[Any]) -> Any:
        return values[int(random.integers(len(values)))]

    match one(_PLAIN + _COMPOUND if depth else _PLAIN):
        case "integer":
            low = int(random.integers(-1000, 1000))
            return {"type": "integer", "minimum": low, "exclusiveMaximum": low + int(random.integers(2, 10**6))}
        case "multiple":
            return {"type": "integer", "multipleOf": one([3, 7, 10]), "minimum": 0, "maximum": 1000}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": one([2e10, 1.5, 77.25])}
        case "string":
            low = int(random.integers(0, 4))
            return {"type": "string", "minLength": low, "maxLength": low + int(random.integers(1, 8))}
        case "pattern":
            patterns = ["^[a-f0-9]{4}$", "^(yes|no)$", "^[A-Z][a-z]{1,5}$", r"^\d{2}:\d{2}$"]
            limited = {"pattern": "^[a-c]+$", "maxLength": int(random.integers(1, 9))}
            return {"type": "string"} | one([limited, *({"pattern": it} for it in patterns)])
        case "format":
            return {"type": "string", "format": one(["date", "time", "date-time", "ipv4", "uuid"])}
        case "enum":
            values: list[Any] = ["red", "grün", 1, 2.5, None, True, [1, "x"], {"k": 0}]
            chosen = random.choice(len(values), int(random.integers(1, 5)), replace=False)
            return {"enum": [values[i] for i in chosen]}
        case "const":
            return {"const": {"list": [1, None], "text": 'a "quote"'}}
        case "any":
            return one([{}, {"type": "number"}, {"type": "integer"}, {"type": "string"}])
        case "object":
            names = [f"p{i}" for i in range(int(random.integers(1, 4)))]
            required = [name for name in names if random.random() < 0.7]
            properties = {name: _random_schema(random, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "map":
            limits = {"minProperties": 1, "maxProperties": 2}
            return {"type": "object", "additionalProperties": _random_schema(random, depth - 1), **limits}
        case "array":
            low = int(random.integers(0, 3))
            return {"type": "array", "items": _random_schema(random, depth - 1), "minItems": low, "maxItems": low + 1}
        case "tuple":
            items = [_random_schema(random, depth - 1) for _ in range(2)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
        case "anyOf":
            return {"anyOf": [_random_schema(random, depth - 1) for _ in range(2)]}
        case "allOf":
            low = int(random.integers(-50, 50))
            return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + int(random.integers(0, 100))}]}
        case "types":
            return {"type": ["null", "boolean", "integer"], "minimum": 0, "maximum": 300}
        case "tree":
            return {"$ref": "#/$defs/tree"}
        case kind:
            return {"type": kind}
