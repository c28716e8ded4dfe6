"""Separation of clients: ids, cached prefixes and priorities."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from harness import registry_of
from live_server import TIMEOUT_S, Live, code_and_text, wait_until

from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.client._proto import inference_pb2_grpc as pb_grpc
from serving.commands.serve_config import serve_settings
from serving.grpc_server._proto import open_inference_pb2 as oip
from serving.grpc_server._proto import open_inference_pb2_grpc as oip_grpc
from serving.grpc_server.callers import Callers
from serving.runtime.scheduling_config import SchedulingConfig

pytestmark = pytest.mark.usefixtures("quick_compile")
Status = grpc.StatusCode
LONG = pb.SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
# By default, the channels of a process share connections.
_OWN = (("grpc.use_local_subchannel_pool", 1),)


def connection(live: Live) -> Any:
    return pb_grpc.InferenceServiceStub(grpc.insecure_channel(live.target, _OWN))


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def generate(stub: Any, token: str | None = None, **request: Any) -> Any:
    request.setdefault("params", pb.SamplingParams(temperature=0, max_tokens=4))
    metadata = bearer(token) if token else None
    return stub.Generate(pb.GenerateRequest(**request), timeout=TIMEOUT_S, metadata=metadata)


def test_connections_do_not_take_ids_from_each_other(live: Live):
    one, other = connection(live), connection(live)
    first = generate(one, text="hello", request_id="mine", params=LONG)
    assert next(first).request_id == "mine"
    second = generate(other, text="hello", request_id="mine")
    assert {message.request_id for message in second} == {"mine"}
    code, _ = code_and_text(lambda: list(generate(one, text="hello", request_id="mine")))
    assert code is Status.ALREADY_EXISTS
    first.cancel()
    live.check_idle()


def test_tokens_do_not_take_ids_from_each_other(start: Callable[..., Live]):
    live = start(api_token=("red", "blue"), admin_token="root")
    first = generate(live.inference, "red", text="hello", request_id="mine", params=LONG)
    next(first)
    abort = pb.AbortRequest(request_id="mine")
    assert not live.inference.Abort(abort, metadata=bearer("blue")).aborted
    list(generate(live.inference, "blue", text="hello", request_id="mine"))
    assert live.inference.Abort(abort, metadata=bearer("root")).aborted, "the admin may"
    *_, last = first
    assert last.completions[0].finish_reason == pb.FINISH_REASON_ABORT
    second = generate(live.inference, "red", text="hello", request_id="mine", params=LONG)
    next(second)
    assert live.inference.Abort(abort, metadata=bearer("red")).aborted
    list(second)


def test_abort_reaches_other_connections_where_there_are_no_tokens(live: Live):
    stream = generate(connection(live), text="hello", request_id="theirs", params=LONG)
    next(stream)
    assert connection(live).Abort(pb.AbortRequest(request_id="theirs")).aborted
    *_, last = stream
    assert last.completions[0].finish_reason == pb.FINISH_REASON_ABORT
    live.check_idle()


def infer_request(text: str, request_id: str = "", **parameters: Any) -> oip.ModelInferRequest:
    tensor = oip.ModelInferRequest.InferInputTensor
    request = oip.ModelInferRequest(
        model_name="tiny-chat",
        id=request_id,
        inputs=[
            tensor(name="text_input", datatype="BYTES", shape=[1]),
            tensor(name="sampling_parameters", datatype="BYTES", shape=[1]),
            tensor(name="stream", datatype="BOOL", shape=[1]),
        ],
    )
    for value in (text.encode(), b'{"max_tokens": 4, "temperature": 0}'):
        request.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
    request.raw_input_contents.append(b"\1")
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return request


def test_tritons_clients_may_use_an_id_again(live: Live):
    stub = oip_grpc.GRPCInferenceServiceStub(live.channel)
    answers = list(stub.ModelStreamInfer(iter([infer_request("hello", "same") for _ in range(8)]), timeout=TIMEOUT_S))
    assert not [answer.error_message for answer in answers if answer.error_message]
    assert {answer.infer_response.id for answer in answers} == {"same"}
    assert sum(a.infer_response.parameters["triton_final_response"].bool_param for a in answers) == 8
    live.check_idle()


def cached_tokens(stub: Any, token: str | None, text: str, **request: Any) -> int:
    *_, last = generate(stub, token, text=text, **request)
    return last.usage.cached_tokens


def test_tokens_share_no_cached_prefixes(start: Callable[..., Live]):
    live = start(api_token=("red", "blue"))
    text = "what one client has asked " * 8
    assert cached_tokens(live.inference, "red", text) == 0
    assert cached_tokens(live.inference, "blue", text) == 0, "it tells nothing about others"
    assert cached_tokens(live.inference, "red", text) > 100
    assert cached_tokens(live.inference, "red", text, cache_salt="apart") == 0


def test_open_inference_may_set_a_salt(live: Live):
    stub = oip_grpc.GRPCInferenceServiceStub(live.channel)
    text = "the same prompt of two tenants " * 8
    before = live.llm.stats.cached_tokens
    for salt in ("one", "two"):
        list(stub.ModelStreamInfer(iter([infer_request(text, cache_salt=salt)]), timeout=TIMEOUT_S))
    assert live.llm.stats.cached_tokens == before
    list(stub.ModelStreamInfer(iter([infer_request(text, cache_salt="one")]), timeout=TIMEOUT_S))
    assert live.llm.stats.cached_tokens > before + 100


def test_priorities_above_the_bound_are_for_the_admin(start: Callable[..., Live]):
    live = start(api_token="red", admin_token="root", min_priority=-1)
    urgent = pb.SamplingParams(temperature=0, max_tokens=2, priority=-2)
    code, text = code_and_text(lambda: list(generate(live.inference, "red", text="x", params=urgent)))
    assert code is Status.INVALID_ARGUMENT
    assert "min_priority" in text
    assert list(generate(live.inference, "root", text="x", params=urgent))
    urgent.priority = -1
    assert list(generate(live.inference, "red", text="x", params=urgent))


def test_a_token_file_may_have_several_tokens(tmp_path: Path):
    path = tmp_path / "tokens"
    path.write_text("red\n\n  blue \n")
    server, _, _ = serve_settings({"api_token_file": str(path)}, {})
    assert server.api_tokens == ("red", "blue")


def test_drain_is_not_held_up_by_what_waits_for_the_engine(live: Live):
    """Calls block all worker threads, and the drain still aborts requests."""
    stream = generate(live.inference, text="hello", params=LONG)
    next(stream)
    door, go_on = live.server.request_handler, threading.Event()
    threads = door._threads
    pools: list[ThreadPoolExecutor] = [
        threads.control,
        threads.transforming,
        threads.tokenizing,
        threads.tokenizing_long,
    ]
    for pool in pools:
        for _ in range(16):
            pool.submit(go_on.wait, TIMEOUT_S)
    try:
        assert live.loop.run(asyncio.wait_for(live.server.drain(0.1), TIMEOUT_S)) == 1
    finally:
        go_on.set()
    *_, last = stream
    assert last.completions[0].finish_reason == pb.FINISH_REASON_ABORT


def test_transformations_that_are_waited_for_are_limited(live: Live):
    door, go_on = live.server.request_handler, threading.Event()

    async def wait() -> list[Any]:
        waiting = [asyncio.ensure_future(door.transform(lambda: go_on.wait(TIMEOUT_S))) for _ in range(5)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        errors = [task.exception() for task in done]
        go_on.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        return errors

    (error,) = live.loop.run(wait())
    assert "which is the limit" in str(error)
    wait_until(lambda: door._num_transforming == 0)


@pytest.mark.parametrize("policy", [None, "amoeba"])
def test_no_token_takes_all_slots_from_another(start: Callable[..., Live], policy: str | None):
    """One client fills all eight slots and has 16 more requests in the queue."""
    scheduling = None if policy is None else SchedulingConfig(policy)
    live = start(api_token=("red", "blue"), scheduling=scheduling, max_requests_per_client=64)
    streams = [generate(live.inference, "red", text=f"{n}", params=LONG) for n in range(24)]
    wait_until(lambda: sum(view.running for view in live.llm.instances) == 8)
    other = generate(live.inference, "blue", text="hello")
    assert [message.completions[0].finish_reason for message in other][-1] == pb.FINISH_REASON_LENGTH
    wait_until(lambda: sum(view.running for view in live.llm.instances) == 8)
    assert live.server.request_handler.admission.ids, "the others go on"
    for stream in streams:
        stream.cancel()
    wait_until(lambda: not registry_of(live.llm).ids)


@pytest.mark.parametrize("token", [None, "red"])
@pytest.mark.parametrize(
    ("peer", "hosts"),
    [
        ("ipv4:10.1.2.3:456", ("10.1.2.3", "::ffff:10.1.2.3")),
        ("ipv6:%5B::ffff:10.1.2.3%5D:456", ("10.1.2.3",)),
        ("ipv6:[2001:db8::1]:456", ("2001:db8::1", "2001:0db8:0:0::1")),
        ("unix:", ("unix",)),
        ("unix:/run/socket", ("unix",)),
    ],
)
def test_a_client_is_the_same_over_grpc_and_http(token: str | None, peer: str, hosts: tuple[str, ...]):
    callers = Callers(("red",) if token else ())
    context = SimpleNamespace(peer=lambda: peer, invocation_metadata=lambda: bearer(token) if token else ())
    over_grpc = callers.caller(cast(Any, context))
    for host in hosts:
        over_http = callers.identify(host, f"{host}:789", token)
        assert (over_http.client, over_http.account) == (over_grpc.client, over_grpc.account)
    assert over_grpc.client == hosts[0]
