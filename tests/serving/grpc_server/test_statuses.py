"""Failures of requests: each has its status and leaves no state behind."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from live_server import TIMEOUT_S, Live, code_and_text

from amoeba_jax import SamplingParams
from amoeba_jax.client import requests
from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.client._proto import inference_pb2_grpc as pb_grpc
from amoeba_jax.outputs import RequestDelta
from serving.grpc_server import output_coalescer
from serving.grpc_server.callers import Caller
from serving.grpc_server.calls import Call
from serving.grpc_server.statuses import SlowReaderError, public_text

pytestmark = pytest.mark.usefixtures("quick_compile")

LONG = pb.SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
Status = grpc.StatusCode
CALLER = Caller("test", "connection", "test")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "prompt is empty"),
        ({"text": ""}, "prompt is empty"),
        ({"token_ids": pb.TokenIds()}, "prompt is empty"),
        ({"chat": pb.Chat()}, "prompt is empty"),
        ({"token_ids": pb.TokenIds(ids=[3, 256])}, "outside the vocabulary"),
        ({"text": "x", "params": pb.SamplingParams(max_tokens=5000)}, "over the limit of 4096"),
        ({"text": "x", "params": pb.SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"text": "x", "params": pb.SamplingParams(temperature=-1)}, "temperature"),
        ({"text": "x", "params": pb.SamplingParams(top_p=0)}, "top_p"),
        ({"text": "x", "params": pb.SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"text": "x", "params": pb.SamplingParams(stop=["a"] * 17)}, "at most 16"),
        ({"text": "x", "params": pb.SamplingParams(stop=[""])}, "empty string"),
        ({"text": "x", "params": pb.SamplingParams(logit_bias={300: 1.0})}, "logit_bias"),
        ({"text": "x", "request_id": "x" * 129}, "at most 128"),
    ],
)
def test_what_cannot_be_served_is_invalid(live: Live, fields: dict[str, Any], said: str):
    code, text = code_and_text(lambda: list(live.generate(**fields)))
    assert code is Status.INVALID_ARGUMENT
    assert said in text
    live.check_idle()


def raw_call(live: Live, message: bytes) -> None:
    """Call `Generate` with bytes that may be an invalid message."""
    call = live.channel.unary_stream("/amoeba.v1.InferenceService/Generate")
    list(call(message, timeout=TIMEOUT_S))


@pytest.mark.parametrize("message", [b"\x1a\x02\xff\xfe", b"\x1a\x7fx", b"\xff" * 40])
def test_text_that_is_not_utf8_and_damaged_messages_are_invalid(live: Live, message: bytes):
    code, _ = code_and_text(lambda: raw_call(live, message))
    assert code is Status.INVALID_ARGUMENT
    live.check_idle()


def test_unknown_model_is_not_found(live: Live):
    code, text = code_and_text(lambda: list(live.generate(text="x", model="other")))
    assert code is Status.NOT_FOUND
    assert "other" in text
    live.check_idle()


def test_unknown_method_is_unimplemented(live: Live):
    call = live.channel.unary_unary("/amoeba.v1.InferenceService/Nothing")
    code, _ = code_and_text(lambda: call(b"", timeout=TIMEOUT_S))
    assert code is Status.UNIMPLEMENTED


def test_id_of_a_running_request_is_taken(live: Live):
    stream = live.generate(text="hello", request_id="same", params=LONG)
    next(stream)
    code, _ = code_and_text(lambda: list(live.generate(text="x", request_id="same")))
    assert code is Status.ALREADY_EXISTS
    stream.cancel()
    live.check_idle()
    assert list(live.generate(text="x", request_id="same"))


def fill_slots(live: Live) -> list[Any]:
    """Start requests that take all slots. Further requests stay in the queue."""
    streams = []
    for index in range(8):
        streams.append(live.generate(text=f"hello {index}", params=LONG))
        next(streams[-1])
    return streams


def test_full_queue_is_exhausted(start: Callable[..., Live]):
    live = start(max_queued_requests=2)
    running = fill_slots(live)
    queued = [live.generate(text=f"queued {index}", params=LONG) for index in range(2)]
    admission = live.server.request_handler.admission
    wait_until(live, lambda: admission.requests_by_class.total() == 2)
    code, text = code_and_text(lambda: list(live.generate(text="one more")))
    assert code is Status.RESOURCE_EXHAUSTED
    assert "2 requests are queued" in text
    for stream in running + queued:
        stream.cancel()
    live.check_idle()


def wait_until(live: Live, holds: Callable[[], bool]) -> None:
    """Run the server's event loop until a condition holds."""

    async def wait() -> None:
        while not holds():
            await asyncio.sleep(0)

    live.loop.run(asyncio.wait_for(wait(), TIMEOUT_S))


def test_queued_tokens_are_limited(start: Callable[..., Live]):
    live = start(max_queued_tokens=20)
    slots = fill_slots(live)
    queued = live.generate(text="x" * 15, params=LONG)
    wait_until(live, lambda: live.server.request_handler.admission.tokens_by_class.total() == 15)
    code, text = code_and_text(lambda: list(live.generate(text="y" * 6)))
    assert code is Status.RESOURCE_EXHAUSTED
    assert "limit of 20" in text
    for stream in [*slots, queued]:
        stream.cancel()
    live.check_idle()


def test_requests_of_one_client_are_limited(start: Callable[..., Live]):
    live = start(max_requests_per_client=1)
    stream = live.generate(text="hello", params=LONG)
    next(stream)
    code, _ = code_and_text(lambda: list(live.generate(text="x")))
    assert code is Status.RESOURCE_EXHAUSTED
    stream.cancel()
    live.check_idle()


def test_samples_of_one_client_are_limited(start: Callable[..., Live]):
    live = start(max_samples_per_client=4)
    code, text = code_and_text(lambda: list(live.generate(text="x", params=pb.SamplingParams(n=5))))
    assert code is Status.RESOURCE_EXHAUSTED
    assert "5 more would exceed the limit of 4 (max_samples_per_client)" in text
    live.check_idle()


def test_message_and_header_sizes_are_limited(start: Callable[..., Live]):
    live = start(max_message_bytes=10_000, max_header_bytes=4096)
    code, _ = code_and_text(lambda: list(live.generate(text="x" * 20_000)))
    assert code is Status.RESOURCE_EXHAUSTED
    request = pb.TokenizeRequest(text="x")
    metadata = (("x-long", "y" * 8192),)
    code, _ = code_and_text(lambda: live.inference.Tokenize(request, metadata=metadata, timeout=TIMEOUT_S))
    assert code is Status.RESOURCE_EXHAUSTED
    live.check_idle()


def test_deadline_in_mid_stream_frees_the_pages(live: Live):
    stream = live.generate(text="hello", params=LONG, timeout=1.0)
    code, _ = code_and_text(lambda: list(stream))
    assert code is Status.DEADLINE_EXCEEDED
    live.check_idle()


def test_deadline_in_the_queue(live: Live):
    slots = fill_slots(live)
    code, _ = code_and_text(lambda: list(live.generate(text="waits", timeout=0.2)))
    assert code is Status.DEADLINE_EXCEEDED
    for stream in slots:
        stream.cancel()
    live.check_idle()


def test_own_deadline_of_a_request_is_kept_without_the_client(live: Live):
    """gRPC knows no deadlines of single requests if a stream carries many requests."""
    sent: list[RequestDelta] = []

    async def send(delta: RequestDelta) -> None:
        sent.append(delta)

    call = Call("timed", "hello", SamplingParams(temperature=0, max_tokens=3000), CALLER, timeout_s=0.5)
    with pytest.raises(ValueError, match="deadline exceeded"):
        live.loop.run(live.server.request_handler.serve(call, send))
    assert sent
    live.check_idle()


def test_cancelled_request_frees_its_pages(live: Live):
    stream = live.generate(text="hello", params=LONG)
    next(stream)
    stream.cancel()
    code, _ = code_and_text(lambda: list(stream))
    assert code is Status.CANCELLED
    live.check_idle()


def test_request_cancelled_in_the_queue_leaves_it(live: Live):
    slots = fill_slots(live)
    queued = live.generate(text="waits")
    wait_until(live, lambda: live.server.request_handler.admission.requests_by_class.total() == 1)
    queued.cancel()
    wait_until(live, lambda: live.server.request_handler.admission.requests_by_class.total() == 0)
    for stream in slots:
        stream.cancel()
    live.check_idle()


def test_cancelling_at_any_moment_leaves_nothing(live: Live):
    """Requests are canceled before they are read, in the queue, in mid-stream and after their end."""
    pause = threading.Event()
    streams = []
    for index in range(60):
        streams.append(live.generate(text=f"request {index}"))
        if index % 3 == 0:
            streams[index // 2].cancel()
        pause.wait(0.001 * (index % 7))
    for index, stream in enumerate(streams):
        if index % 2:
            stream.cancel()
        with contextlib.suppress(grpc.RpcError):
            list(stream)
        assert stream.code() in (Status.OK, Status.CANCELLED)
    live.check_idle()


def test_client_that_does_not_read_is_cut_off(start: Callable[..., Live], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output_coalescer, "CUT_OFF_S", 0.1)
    live = start(max_buffered_tokens=64 * 21)
    # Messages of log-probabilities are long, and this client's buffers are small.
    params = SamplingParams(temperature=0, max_tokens=3500, logprobs=20, ignore_eos=True)
    message = pb.GenerateRequest(text="hello", params=requests.params_message(params))
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 * 1024))
    channel = grpc.insecure_channel(live.target, options)
    stream = pb_grpc.InferenceServiceStub(channel).Generate(message, timeout=TIMEOUT_S)
    next(stream)
    live.loop.run(asyncio.wait_for(live.server.request_handler._idle.wait(), TIMEOUT_S))
    code, text = code_and_text(lambda: list(stream))
    assert code is Status.CANCELLED
    assert f"limit of {64 * 21} (max_buffered_tokens)" in text
    channel.close()
    live.check_idle()


def test_slow_reader_is_cut_off_once_it_is_over_the_limit(live: Live, monkeypatch: pytest.MonkeyPatch):
    """The engine does not wait for the reader, so unread output has a limit."""
    monkeypatch.setattr(output_coalescer, "CUT_OFF_S", 0.0)
    stuck = threading.Event()

    async def never(_: RequestDelta) -> None:
        stuck.set()
        await asyncio.Event().wait()

    call = Call("slow", "hello", SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True), CALLER)
    with pytest.raises(SlowReaderError, match="limit of 1024 "):
        live.loop.run(live.server.request_handler.serve(call, never))
    assert stuck.is_set()
    live.check_idle()


def test_loading_server_is_unavailable(start: Callable[..., Live]):
    live = start(attach=False)
    for call in (
        lambda: list(live.generate(text="x")),
        lambda: live.inference.Tokenize(pb.TokenizeRequest(text="x")),
        lambda: live.inference.GetModelInfo(pb.GetModelInfoRequest()),
        lambda: live.admin.GetCluster(pb.GetClusterRequest()),
        lambda: live.admin.Transform(pb.TransformRequest(tensor_parallel_size=2)),
    ):
        code, text = code_and_text(call)
        assert code is Status.UNAVAILABLE
        assert "loading" in text


def test_draining_server_finishes_and_takes_nothing_new(start: Callable[..., Live]):
    live = start()
    stream = live.generate(text="hello", params=pb.SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    drain = live.admin.Drain.future(pb.DrainRequest(), timeout=TIMEOUT_S)
    wait_until(live, lambda: live.server.request_handler.state.name == "DRAINING")
    code, _ = code_and_text(lambda: list(live.generate(text="x")))
    assert code is Status.UNAVAILABLE
    *_, last = stream
    assert last.completions[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert drain.result().aborted == 0


@pytest.mark.parametrize("by_signal", [False, True])
def test_drain_lets_paused_requests_go_on(start: Callable[..., Live], by_signal: bool):
    """If paused requests did not continue, the drain would wait forever."""
    live = start()
    stream = live.generate(text="hello", params=pb.SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    pause = pb.TransformRequest(tensor_parallel_size=2, running=pb.RUNNING_REQUESTS_PAUSE, release_weights=False)
    assert live.admin.Transform(pause, timeout=TIMEOUT_S).paused == 1
    if by_signal:
        assert live.loop.run(live.server.drain(TIMEOUT_S / 2)) == 0
    else:
        assert live.admin.Drain(pb.DrainRequest(), timeout=TIMEOUT_S).aborted == 0
    *_, last = stream
    assert last.completions[0].finish_reason == pb.FINISH_REASON_LENGTH


def test_drain_aborts_what_takes_too_long(start: Callable[..., Live]):
    live = start()
    stream = live.generate(text="hello", params=LONG)
    next(stream)
    assert live.admin.Drain(pb.DrainRequest(timeout_s=0.1), timeout=TIMEOUT_S).aborted == 1
    *_, last = stream
    assert last.completions[0].finish_reason == pb.FINISH_REASON_ABORT


def test_error_texts_name_no_path_and_no_address():
    text = public_text(
        "cannot read /home/someone/model/x.bin: <object at 0x7f001122aa> in C:\\Users\\me\\x " + "y" * 5000
    )
    assert "someone" not in text
    assert "Users" not in text
    assert "0x7f" not in text
    assert len(text) <= 1000
    assert public_text("must be in [0, 1]/[2, 3], or and/or 1/2") == "must be in [0, 1]/[2, 3], or and/or 1/2"
