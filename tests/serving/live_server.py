"""A server in this process with its own event loop, and the checks of an idle server."""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import pytest
from harness import registry_of

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.client import Client
from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.client._proto import inference_pb2_grpc as pb_grpc
from serving.grpc_server.server import Server
from serving.runtime.scheduling import Scheduling

T = TypeVar("T")
TIMEOUT_S = 120
"""Limit of waits that could last forever. A test that reaches it has failed."""
GREEDY = SamplingParams(temperature=0, max_tokens=8)


class LoopThread:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        give_up = time.monotonic() + TIMEOUT_S
        while time.monotonic() < give_up:
            with contextlib.suppress(TimeoutError):
                return future.result(2.0)
            # All event loops of a process share gRPC's event queue. If a loop ends during calls, events of other loops
            # may stay in the queue until the next event comes. This call makes an event.
            asyncio.run_coroutine_threadsafe(_make_an_event(), self.loop)
        raise TimeoutError(f"not done within {TIMEOUT_S} s")

    def close(self) -> None:
        gc.collect()  # collected servers still need their loop
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _make_an_event() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with contextlib.suppress(grpc.RpcError):
            await channel.unary_unary("/nothing/listens")(b"", timeout=0.1)


@dataclass
class Live:
    """A running server with its clients."""

    server: Server
    llm: LLM
    loop: LoopThread
    channel: grpc.Channel
    scheduling: Scheduling | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def inference(self) -> Any:
        return pb_grpc.InferenceServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        return pb_grpc.AdminServiceStub(self.channel)

    def generate(self, **fields: Any) -> Any:
        """Start a `Generate` call with these fields of the request. Sampling is greedy by default."""
        fields.setdefault("params", pb.SamplingParams(temperature=0, max_tokens=8))
        timeout = fields.pop("timeout", TIMEOUT_S)
        return self.inference.Generate(pb.GenerateRequest(**fields), timeout=timeout)

    def check_idle(self) -> None:
        """Check that no request is left. All counters are zero, and the next answer equals the Python API's."""
        self.loop.run(asyncio.wait_for(self.server.request_handler._idle.wait(), TIMEOUT_S))
        admission = self.server.request_handler.admission
        assert (admission.ids, admission.requests_by_class.total(), admission.tokens_by_class.total()) == (set(), 0, 0)
        assert not admission._requests_of
        # The engine removes a cancelled request between two steps.
        idle = (0, 0, 0)
        wait_until(lambda: all((v.running, v.waiting, v.kv_used_pages) == idle for v in self.llm.instances))
        wait_until(lambda: not registry_of(self.llm).ids)
        with Client(self.target) as client:
            answer = client.generate("after all that", GREEDY)[0]
        expected = self.llm.generate("after all that", GREEDY)[0].outputs[0]
        assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)


def wait_until(what: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Poll until a condition holds."""
    give_up = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < give_up, "it never came to that"
        time.sleep(0.01)


def code_and_text(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    """Return the status and text of a failed call. The text must not reveal anything about this machine."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    text = error.details()
    assert "/tmp" not in text
    assert "site-packages" not in text
    assert "0x" not in text
    return error.code(), text
