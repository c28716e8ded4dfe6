"""Structured output over gRPC: the same text as the Python API, and refusals that affect no other request."""

import asyncio

import grpc
import pytest
from live_server import TIMEOUT_S, Live

from amoeba_jax import SamplingParams, StructuredOutput
from amoeba_jax.client import AsyncClient, Client
from amoeba_jax.client._proto import inference_pb2 as pb

pytestmark = pytest.mark.usefixtures("quick_compile")

DATE = StructuredOutput(regex="[0-9]{4}-[0-9]{2}")
NESTED = "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(3000)) + '\na3000: "x"'
PARAMS = SamplingParams(seed=3, max_tokens=20, structured=DATE)


def test_both_clients_get_the_text_of_the_api(live: Live):
    expected = live.llm.generate("hello", PARAMS)[0].outputs[0]
    assert expected.finish_reason == "stop"

    async def generate() -> str:
        async with AsyncClient(live.target) as client:
            return (await client.generate("hello", PARAMS, timeout_s=TIMEOUT_S))[0].text

    with Client(live.target) as client:
        (answer,) = client.generate("hello", PARAMS, timeout_s=TIMEOUT_S)
    assert (answer.text, answer.finish_reason) == (expected.text, "stop")
    assert asyncio.run(generate()) == expected.text
    live.check_idle()


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        (pb.StructuredOutput(json_schema='{"const": "' + "x" * 2**20 + '"}'), "over the limit of 131072"),
        (pb.StructuredOutput(json_schema='{"$ref": "#"}'), "allows no text"),
        (pb.StructuredOutput(json_schema='{"not": {}}'), 'Unimplemented keys: ["not"]'),
        (pb.StructuredOutput(regex="(" * 2**16), "structured.regex cannot be used"),
        (pb.StructuredOutput(grammar=NESTED), "too complex"),
    ],
    ids=["size", "recursive", "unsupported", "regex", "nested"],
)
def test_bad_constraints_are_invalid_arguments(live: Live, structured: pb.StructuredOutput, reason: str):
    params = pb.SamplingParams(max_tokens=4, structured=structured)
    with pytest.raises(grpc.RpcError) as error:
        list(live.generate(text="hello", params=params))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason in (error.value.details() or "")
    with Client(live.target) as client:
        assert client.generate("hello", PARAMS, timeout_s=TIMEOUT_S)[0].finish_reason == "stop"
    live.check_idle()
