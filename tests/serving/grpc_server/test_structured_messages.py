"""Structured output in messages and in the JSON of Triton's clients."""

import json

import pytest

from amoeba_jax import SamplingParams, StructuredOutput
from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.client.requests import params_message
from amoeba_jax.errors import RequestError
from serving.grpc_server.callers import Caller
from serving.grpc_server.config import Limits
from serving.grpc_server.messages import read_params
from serving.grpc_server.settings_json import params_from_settings, parse_settings

CALLER, LIMITS = Caller("address", "scope", "account"), Limits()
SCHEMA = {"type": "object", "properties": {"a": {"items": {"items": {"items": {"const": [[[1]]]}}}}}}
EACH = [
    StructuredOutput(json_schema=SCHEMA),
    StructuredOutput(json_object=True),
    StructuredOutput(regex="a+"),
    StructuredOutput(grammar='start: "a"'),
    StructuredOutput(choice=("a", "b")),
]


@pytest.mark.parametrize("structured", EACH, ids=lambda it: it.kind)
def test_messages_carry_every_constraint(structured: StructuredOutput):
    message = params_message(SamplingParams(structured=structured))
    sent = pb.SamplingParams.FromString(message.SerializeToString())
    assert read_params(sent, LIMITS, CALLER).structured == structured


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.StructuredOutput(), "exactly one"),
        (pb.StructuredOutput(json_object=False), "exactly one"),
        (pb.StructuredOutput(regex=""), "non-empty"),
        (pb.StructuredOutput(choice=pb.Choices()), "1 to 1024"),
        (pb.StructuredOutput(json_schema='{"const": "' + "x" * 2**20 + '"}'), "over the limit of 131072"),
    ],
)
def test_messages_with_an_invalid_constraint_are_refused(message: pb.StructuredOutput, reason: str):
    with pytest.raises(RequestError, match=reason):
        read_params(pb.SamplingParams(structured=message), LIMITS, CALLER)


@pytest.mark.parametrize("key", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize("as_text", [False, True])
def test_settings_of_triton_have_the_keys_of_vllm(key: str, as_text: bool):
    contents = [
        {"json": SCHEMA},
        {"json_object": True},
        {"regex": "a+", "json": None},
        {"grammar": 'start: "a"'},
        {"choice": ["a", "b"]},
    ]
    for content, structured in zip(contents, EACH, strict=True):
        data = json.dumps({key: json.dumps(content) if as_text else content}).encode()
        assert params_from_settings(parse_settings(data, LIMITS), LIMITS, CALLER).structured == structured


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}}, "two names of one setting"),
        ({"structured_outputs": {"structural_tag": "a"}}, "unknown keys .*structural_tag.* known are json, "),
        ({"structured_outputs": 3}, "must be a JSON object, got 3"),
        ({"structured_outputs": "{"}, "structured_outputs is not valid JSON"),
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"json_object": "yes"}}, "must be True or False"),
    ],
)
def test_settings_of_triton_with_an_invalid_constraint_are_refused(settings: dict, reason: str):
    with pytest.raises(RequestError, match=reason):
        params_from_settings(parse_settings(json.dumps(settings).encode(), LIMITS), LIMITS, CALLER)
