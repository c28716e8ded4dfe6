"""Constraints of many kinds, with independent checks of complete texts."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema

from amoeba_jax import StructuredOutput

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
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"kids": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}}},
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9, "minimum": 0}, "maxProperties": 2},
    {"type": ["integer", "null"], "maximum": 1000, "minimum": 0},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False},
]


def valid_against(schema: Any) -> Check:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
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
