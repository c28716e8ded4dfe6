"""SLOs of single requests: clients of both protocols send them, and policies receive them."""

import json
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from live_server import GREEDY, Live
from tritonclient.utils import InferenceServerException

from amoeba_jax import SamplingParams
from amoeba_jax.client import Client
from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.client.requests import params_message
from amoeba_jax.errors import RequestError
from serving.grpc_server.callers import Caller
from serving.grpc_server.calls import Call
from serving.grpc_server.config import Limits
from serving.grpc_server.messages import read_params
from serving.grpc_server.request_handler import Send
from serving.runtime import waiting_view
from serving.runtime.scheduling_config import SchedulingConfig

pytestmark = pytest.mark.usefixtures("quick_compile")

SLOS = {"ttft_slo_s": 1.5, "tpot_slo_s": 0.25}
USER = Caller("c", "s", "a", "", has_admin_token=False, may_abort_all=False)
ADMIN = Caller("c", "s", "a", "", has_admin_token=True, may_abort_all=True)


@pytest.fixture
def served(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """Return the settings of the requests that reach the server's handler."""
    handler, found = live.server.request_handler, []
    serve = handler.serve

    async def watched(call: Call, send: Send) -> None:
        found.append(call.params)
        await serve(call, send)

    monkeypatch.setattr(handler, "serve", watched)
    return found


def test_they_come_to_the_policy(start: Callable[..., Live], monkeypatch: pytest.MonkeyPatch):
    live, seen = start(scheduling=SchedulingConfig()), []
    shown = waiting_view.waiting_request

    def watched(name: str, sequence: Any) -> Any:
        seen.append(shown(name, sequence))
        return seen[-1]

    monkeypatch.setattr(waiting_view, "waiting_request", watched)
    with Client(live.target) as client:
        client.generate("hello", SamplingParams(temperature=0, max_tokens=2, **SLOS))
        client.generate("hello", GREEDY)
    assert list(dict.fromkeys((it.ttft_slo_s, it.tpot_slo_s) for it in seen)) == [(1.5, 0.25), (None, None)]


def test_messages_have_what_was_given():
    for slos in ({}, SLOS, {"tpot_slo_s": 3.0}):
        params = read_params(params_message(SamplingParams(**slos)), Limits(), USER)
        assert params == SamplingParams(**slos)


@pytest.mark.parametrize(("name", "least_ms"), [("ttft_slo", 500), ("tpot_slo", 20)])
def test_no_client_asks_for_less_than_the_server_allows(name: str, least_ms: int):
    """Transformations for one request delay other requests."""
    limits = Limits(**{f"min_{name}_ms": least_ms})
    at_limit, below = ({f"{name}_s": least_ms / 1e3 * factor} for factor in (1, 0.99))
    read_params(pb.SamplingParams(**at_limit), limits, USER)
    with pytest.raises(RequestError, match=rf"{name}_s=.* is below .*min_{name}_ms"):
        read_params(pb.SamplingParams(**below), limits, USER)
    read_params(pb.SamplingParams(**below), limits, ADMIN)


def test_values_that_cannot_be_are_the_clients_fault(start: Callable[..., Live]):
    live = start(min_ttft_slo_ms=100)
    for slo_s, text in ((-1.0, "ttft_slo_s must be"), (float("nan"), "ttft_slo_s must be"), (0.05, "min_ttft_slo_ms")):
        with pytest.raises(grpc.RpcError) as error:
            list(live.generate(text="x", params=pb.SamplingParams(ttft_slo_s=slo_s)))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        assert text in error.value.details()  # type: ignore[attr-defined]


def tensor(name: str, text: str) -> triton.InferInput:
    given = triton.InferInput(name, [1], "BYTES")
    given.set_data_from_numpy(np.array([text], dtype=np.object_))
    return given


def test_triton_sends_them_in_the_settings_or_as_request_parameters(live: Live, served: list[SamplingParams]):
    settings = {"temperature": 0, "max_tokens": 2}
    text = tensor("text_input", "hello")
    with triton.InferenceServerClient(live.target) as client:
        client.infer("tiny-chat", [text, tensor("sampling_parameters", json.dumps(settings | SLOS))])
        texts = {name: str(value) for name, value in SLOS.items()}  # this client sends no floats
        client.infer("tiny-chat", [text], parameters=settings | texts)
        beside = tensor("sampling_parameters", json.dumps(settings | {"ttft_slo_s": 9}))
        client.infer("tiny-chat", [text, beside], parameters=texts)
        with pytest.raises(InferenceServerException, match="tpot_slo_s must be"):
            client.infer("tiny-chat", [text], parameters=settings | {"tpot_slo_s": 0})
    assert [(it.ttft_slo_s, it.tpot_slo_s) for it in served] == [(1.5, 0.25)] * 3
