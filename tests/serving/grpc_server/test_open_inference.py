"""The Open Inference Protocol through an unmodified `tritonclient` from PyPI."""

import json
import queue
import struct
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from live_server import TIMEOUT_S, Live
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from amoeba_jax import SamplingParams
from serving.grpc_server._proto import open_inference_pb2 as pb
from serving.grpc_server._proto import open_inference_pb2_grpc as pb_grpc

pytestmark = pytest.mark.usefixtures("quick_compile")

MODEL = "tiny-chat"


def tensor(name: str, value: str | bytes | bool) -> triton.InferInput:
    array = np.array([value]) if isinstance(value, bool) else np.array([value], dtype=np.object_)
    given = triton.InferInput(name, [1], np_to_triton_dtype(array.dtype))
    given.set_data_from_numpy(array)
    return given


def inputs(text: str, *, stream: bool = False, settings: dict[str, Any] | None = None, **flags: bool):
    tensors = [tensor("text_input", text), tensor("stream", stream)]
    tensors.append(tensor("sampling_parameters", json.dumps({"temperature": 0, "max_tokens": 8} | (settings or {}))))
    return tensors + [tensor(name, value) for name, value in flags.items()]


def expected(live: Live, text: str, **settings: Any):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 8, **settings})
    return live.llm.generate(text, params)[0]


@pytest.fixture
def client(live: Live):
    with triton.InferenceServerClient(live.target) as connection:
        yield connection


def test_unary_request_has_text_and_figures(live: Live, client: triton.InferenceServerClient):
    flags = ["finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens"]
    given = inputs("hello", settings={"logprobs": 2}, **{f"return_{flag}": True for flag in flags})
    result = client.infer(MODEL, given, request_id="7")
    output = expected(live, "hello", logprobs=2)
    completion = output.outputs[0]
    assert result.get_response().id == "7"
    assert result.as_numpy("text_output").tolist() == [("hello" + completion.text).encode()]
    assert result.as_numpy("finish_reason").tolist() == [b"length"]
    np.testing.assert_allclose(result.as_numpy("cumulative_logprob"), [completion.cumulative_logprob], rtol=1e-6)
    assert result.as_numpy("num_input_tokens").tolist() == [5]
    assert result.as_numpy("num_output_tokens").tolist() == [8]
    logprobs = json.loads(result.as_numpy("logprobs")[0])
    assert [{int(token) for token in entry} for entry in logprobs] == [set(entry) for entry in completion.logprobs]
    live.check_idle()


@pytest.mark.parametrize("exclude", [True, False])
def test_input_is_in_the_output_unless_excluded(live: Live, client: triton.InferenceServerClient, exclude: bool):
    result = client.infer(MODEL, inputs("hello", exclude_input_in_output=exclude))
    text = expected(live, "hello").outputs[0].text
    assert result.as_numpy("text_output")[0].decode() == text if exclude else "hello" + text


def test_settings_may_be_texts_or_request_parameters(live: Live, client: triton.InferenceServerClient):
    text = "hello" + expected(live, "hello", max_tokens=5).outputs[0].text
    given = [tensor("text_input", "hello"), tensor("sampling_parameters", '{"temperature": "0.0", "max_tokens": "5"}')]
    assert client.infer(MODEL, given).as_numpy("text_output")[0].decode() == text
    given = [tensor("text_input", "hello")]
    result = client.infer(MODEL, given, parameters={"temperature": 0, "max_tokens": 5}, priority=3)
    assert result.as_numpy("text_output")[0].decode() == text


def test_samples_are_elements(live: Live, client: triton.InferenceServerClient):
    settings = {"n": 3, "temperature": 0.8, "seed": 3}
    result = client.infer(MODEL, inputs("hello", settings=settings, exclude_input_in_output=True))
    texts = [completion.text for completion in expected(live, "hello", **settings).outputs]
    assert [text.decode() for text in result.as_numpy("text_output")] == texts


def run_stream(client: triton.InferenceServerClient, requests: list[tuple[str, list[Any], dict[str, Any]]]):
    """Send all requests on one stream. Return the responses by id, in order, and all errors under "errors"."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for request_id, given, options in requests:
        client.async_stream_infer(MODEL, given, request_id=request_id, **options)
    by_id: dict[str, list[Any]] = {request_id: [] for request_id, _, _ in requests}
    left = len(requests)
    while left:
        result, error = answers.get(timeout=TIMEOUT_S)
        if error is not None:
            by_id.setdefault("errors", []).append(error)
            left -= 1
            continue
        response = result.get_response()
        by_id[response.id].append(result)
        left -= response.parameters["triton_final_response"].bool_param
    client.stop_stream()
    return by_id


def test_64_requests_share_one_stream(live: Live, client: triton.InferenceServerClient):
    texts = {str(index): f"request {index}" for index in range(64)}
    requests = [(key, inputs(text, stream=True), {}) for key, text in texts.items()]
    results = run_stream(client, requests)
    outputs = live.llm.generate(list(texts.values()), SamplingParams(temperature=0, max_tokens=8))
    for key, output in zip(texts, outputs, strict=True):
        answer = b"".join(result.as_numpy("text_output")[0] for result in results[key])
        assert answer.decode() == output.outputs[0].text
        finals = [result.get_response().parameters["triton_final_response"].bool_param for result in results[key]]
        assert finals == [False] * (len(finals) - 1) + [True]
    live.check_idle()


def test_error_of_one_request_leaves_the_stream_open(live: Live, client: triton.InferenceServerClient):
    requests = [
        ("bad", inputs("x", stream=True, settings={"temperature": -1}), {}),
        ("good", inputs("hello", stream=True), {"enable_empty_final_response": True}),
    ]
    results = run_stream(client, requests)
    assert "temperature" in str(results["errors"][0])
    assert b"".join(r.as_numpy("text_output")[0] for r in results["good"]).decode() == (
        expected(live, "hello").outputs[0].text
    )
    live.check_idle()


def test_timeout_of_a_request_is_in_microseconds(live: Live, client: triton.InferenceServerClient):
    long = inputs("hello", stream=True, settings={"max_tokens": 3000, "ignore_eos": True})
    results = run_stream(client, [("timed", long, {"timeout": 300_000}), ("good", inputs("x", stream=True), {})])
    assert "deadline exceeded" in str(results["errors"][0])
    assert results["good"]
    live.check_idle()


def test_cancelled_stream_frees_its_pages(live: Live, client: triton.InferenceServerClient):
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for index in range(4):
        given = inputs(f"hello {index}", stream=True, settings={"max_tokens": 3000, "ignore_eos": True})
        client.async_stream_infer(MODEL, given, request_id=str(index))
    answers.get(timeout=TIMEOUT_S)
    client.stop_stream(cancel_requests=True)
    live.check_idle()


def test_server_and_model_describe_themselves(live: Live, client: triton.InferenceServerClient):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata().name == "amoeba-jax"
    metadata = client.get_model_metadata(MODEL)
    assert [given.name for given in metadata.inputs][:2] == ["text_input", "stream"]
    config = client.get_model_config(MODEL).config
    assert config.model_transaction_policy.decoupled
    assert [model.name for model in client.get_model_repository_index().models] == [MODEL]
    client.infer(MODEL, inputs("hello"))
    statistics = client.get_inference_statistics(MODEL).model_stats[0]
    assert statistics.inference_stats.success.count == 1
    with pytest.raises(InferenceServerException, match=r"(?i)unimplemented|not found"):
        client.get_system_shared_memory_status()


def raw(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def request(*tensors: tuple[str, str, list[int], bytes], **fields: Any) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(**{"model_name": MODEL, **fields})
    for name, datatype, shape, data in tensors:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(data)
    return message


TEXT = ("text_input", "BYTES", [1], raw(b"hello"))


def settings(data: bytes) -> tuple[str, str, list[int], bytes]:
    return ("sampling_parameters", "BYTES", [1], raw(data))


# Python can read this number, but not a longer one. It cannot print a product of this number.
HUGE = b'{"max_tokens": ' + b"9" * 4300 + b', "n": 10}'


def both_contents() -> pb.ModelInferRequest:
    message = request(TEXT)
    message.inputs[0].contents.bytes_contents.append(b"hello")
    return message


def parameter(**value: Any) -> dict[str, pb.InferParameter]:
    return {name: pb.InferParameter(**{kind: given}) for name, (kind, given) in value.items()}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (request(), "text_input is missing"),
        (request(TEXT, TEXT), "twice"),
        (request(TEXT, ("other", "BOOL", [1], b"\0")), "unknown input tensor"),
        (request(("text_input", "INT32", [1], b"\0\0\0\0")), "must be BYTES"),
        (request(("text_input", "BYTES", [2], raw(b"a") * 2)), "shape"),
        (request(("text_input", "BYTES", [1], b"\x05\0\0\0abc")), "do not match"),
        (request(("text_input", "BYTES", [1], b"ab")), "do not match"),
        (request(("text_input", "BYTES", [1], raw(b"\xff\xfe"))), "not UTF-8"),
        (request(("text_input", "BYTES", [1], raw(b""))), "prompt is empty"),
        (request(TEXT, ("stream", "BOOL", [1], b"\2")), "0 or 1"),
        (request(TEXT, ("stream", "BOOL", [1], b"\1")), "ModelStreamInfer"),
        (both_contents(), "send one of them"),
        (pb.ModelInferRequest(model_name=MODEL, raw_input_contents=[b"x"]), "raw_input_contents"),
        (request(TEXT, settings(b"{")), "not valid JSON"),
        (request(TEXT, settings(b"[" * 100_000)), "nested"),
        (request(TEXT, settings(b"[1]")), "JSON object"),
        (request(TEXT, settings(b'{"temperature": NaN}')), "finite"),
        (request(TEXT, settings(b'{"temperature": 1e999}')), "temperature"),
        (request(TEXT, settings(b'{"seed": ' + b"9" * 9000 + b"}")), "cannot be read"),
        (request(TEXT, settings(HUGE)), "max_tokens must be an integer from 1 to 2147483647"),
        (request(TEXT, settings(b'{"prompt_logprobs": 0}')), "amoeba.v1"),
        (request(TEXT, settings(b'{"best_of": 3}')), "unknown sampling parameters"),
        (request(TEXT, settings(b'{"n": 1, "n": 2}')), "twice"),
        (request(TEXT, settings(b'{"stop": ["a", ' + b'"b", ' * 16 + b'"c"]}')), "at most 16"),
        (request(TEXT, settings(b'{"max_tokens": "many"}')), "must be a number"),
        (request(TEXT, settings(b"\xff")), "not UTF-8"),
        (request(TEXT, settings(b" " * 300_000)), "at most"),
        (request(TEXT, settings(b"{}"), parameters=parameter(top_p=("double_param", 0.5))), "send one of them"),
        (request(TEXT, parameters=parameter(other=("int64_param", 1))), "unknown sampling parameters"),
        (request(TEXT, parameters=parameter(timeout=("int64_param", -1))), "timeout"),
        (request(TEXT, parameters={"top_p": pb.InferParameter()}), "no value"),
        (request(TEXT, outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="x")]), "unknown output tensor"),
    ],
)
def test_wrong_requests_are_invalid(live: Live, message: pb.ModelInferRequest, said: str):
    with pytest.raises(grpc.RpcError) as caught:
        pb_grpc.GRPCInferenceServiceStub(live.channel).ModelInfer(message, timeout=TIMEOUT_S)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in error.details()
    live.check_idle()


def test_huge_numbers_are_invalid_on_a_stream_too(live: Live):
    stub = pb_grpc.GRPCInferenceServiceStub(live.channel)
    (answer,) = stub.ModelStreamInfer(iter([request(TEXT, settings(HUGE))]), timeout=TIMEOUT_S)
    assert answer.error_message.startswith("max_tokens must be an integer from 1 to 2147483647, got an integer of ")
    live.check_idle()


def test_settings_that_are_null_are_not_given(live: Live):
    data = b'{"prompt_logprobs": null, "seed": null, "temperature": 0, "max_tokens": 2}'
    stub = pb_grpc.GRPCInferenceServiceStub(live.channel)
    assert stub.ModelInfer(request(TEXT, settings(data)), timeout=TIMEOUT_S).outputs
    live.check_idle()


@pytest.mark.parametrize("fields", [{"model_name": "other"}, {"model_name": ""}, {"model_version": "2"}])
def test_unknown_model_or_version_is_not_found(live: Live, fields: dict[str, str]):
    with pytest.raises(grpc.RpcError) as caught:
        pb_grpc.GRPCInferenceServiceStub(live.channel).ModelInfer(request(TEXT, **fields), timeout=TIMEOUT_S)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.NOT_FOUND


def test_definitions_are_those_of_the_public_protocol():
    """The client's definitions contain each of our messages and fields, with the same tags and types."""
    theirs = service_pb2.DESCRIPTOR
    pool = {**theirs.message_types_by_name, **theirs.dependencies[0].message_types_by_name}

    def compare(mine: Any, other: Any) -> None:
        for field in mine.fields:
            twin = other.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (twin.number, twin.type, twin.is_repeated), field
        for nested in mine.nested_types:
            compare(nested, other.nested_types_by_name[nested.name])

    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        compare(message, pool[name])
    service = theirs.services_by_name["GRPCInferenceService"]
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        twin = service.methods_by_name[method.name]
        assert (method.input_type.name, method.output_type.name) == (twin.input_type.name, twin.output_type.name)
