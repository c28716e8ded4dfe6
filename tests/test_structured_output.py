"""Constraints on the text of a request: exactly one field, with limits."""

import pytest

from amoeba_jax import SamplingParams, StructuredOutput
from amoeba_jax.errors import RequestError
from amoeba_jax.structured_output import MAX_CHOICES, MAX_CONSTRAINT_BYTES

CYCLE: dict = {}
CYCLE["items"] = CYCLE


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"json_schema": {"type": "integer"}}, "json_schema"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"json_object": True}, "json_object"),
        ({"regex": "a+"}, "regex"),
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"choice": ["yes", "no"]}, "choice"),
    ],
)
def test_each_field_alone_is_a_constraint(fields, kind):
    constraint = StructuredOutput(**fields)
    assert constraint.kind == kind
    assert hash(constraint) == hash(StructuredOutput(**fields))
    assert SamplingParams(structured=constraint).structured == constraint


def test_schemas_are_equal_as_mapping_and_as_text():
    schema = {"type": "object", "properties": {"b": {}, "a": {"const": "ü"}}}
    text = '{ "type": "object", "properties": {"b": {}, "a": {"const": "\\u00fc"}} }'
    stored = StructuredOutput(json_schema=schema).json_schema
    assert stored == '{"type":"object","properties":{"b":{},"a":{"const":"ü"}}}'
    assert StructuredOutput(json_schema=text).json_schema == stored


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json_schema, json_object, regex, grammar, choice, got none"),
        ({"regex": "a", "json_object": True}, "exactly one .*'json_object', 'regex'"),
        ({"json_object": 1}, "json_object must be True or False, got 1"),
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"json_schema": "[]"}, "json_schema must be a JSON object, true or false"),
        ({"json_schema": 7}, "json_schema must be a mapping or JSON text, got 7"),
        ({"json_schema": {"maximum": float("nan")}}, "json_schema is not valid JSON"),
        ({"json_schema": {"const": object()}}, "json_schema is not valid JSON"),
        ({"json_schema": CYCLE}, "json_schema is (nested too deep|not valid JSON)"),
        ({"json_schema": '{"items":' * 20_000 + "{}" + "}" * 20_000}, "json_schema has|nested too deep"),
        ({"json_schema": {"const": "x" * MAX_CONSTRAINT_BYTES}}, f"bytes, over the limit of {MAX_CONSTRAINT_BYTES}"),
        ({"regex": ""}, "regex must be a non-empty string"),
        ({"regex": "ü" * (MAX_CONSTRAINT_BYTES // 2 + 1)}, f"regex has {MAX_CONSTRAINT_BYTES + 2} bytes, over"),
        ({"regex": "\ud800"}, "regex must be valid Unicode"),
        ({"grammar": ["start"]}, "grammar must be a non-empty string"),
        ({"choice": "yes"}, "choice must be a sequence of strings, got 'yes'"),
        ({"choice": []}, f"choice must have 1 to {MAX_CHOICES} strings, got 0"),
        ({"choice": [str(i) for i in range(MAX_CHOICES + 1)]}, f"got {MAX_CHOICES + 1}"),
        ({"choice": ["a", ""]}, "choice must have non-empty strings"),
        ({"choice": ["a", "a"]}, "choice must have different strings"),
        ({"choice": ["a", "\ud800"]}, r"choice\[1\] must be valid Unicode"),
        ({"choice": ["a", "b" * MAX_CONSTRAINT_BYTES]}, "choice has .* bytes, over"),
    ],
)
def test_an_invalid_constraint_is_refused_with_its_reason(fields, message):
    with pytest.raises(RequestError, match=message):
        StructuredOutput(**fields)
