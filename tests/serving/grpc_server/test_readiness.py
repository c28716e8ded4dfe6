"""Readiness of a server that compiles programs while it serves."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import grpc
import pytest
from harness import engine_of
from live_server import TIMEOUT_S, Live, code_and_text, wait_until

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.client import Client
from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.stats import EngineStats
from amoeba_jax.views import DegreePrograms
from serving.commands.serve import _warm_up_beside

pytestmark = pytest.mark.usefixtures("quick_compile")


def programs(live: Live, state: str) -> float | None:
    return live.server.metrics.registry.get_sample_value(
        "amoeba:programs", {"tensor_parallel_size": "2", "state": state}
    )


@pytest.mark.slow
def test_degrees_become_ready_while_the_server_serves(
    start: Callable[..., Live], served_model: Path, compile_cache: str
):
    settings = {"num_devices": 2, "tensor_parallel_size": 1, "device_memory": "64MiB", "max_num_seqs": 1}
    settings |= {"max_num_batched_tokens": 16, "compile_cache": compile_cache, "progress": False}
    with LLM(served_model, **settings) as llm:
        llm.warmup([1])
        opened, background = threading.Event(), engine_of(llm).cluster.executables.background
        compile = background._compile

        def held(wanted):
            assert opened.wait(TIMEOUT_S)
            yield from compile(wanted)

        background._compile = held
        missing = llm.warmup([1, 2], background=True)
        live = start(llm=llm)
        try:
            with Client(live.target) as client:
                first, second = client.cluster().degrees
                assert (first.degree, first.ready) == (1, True)
                assert (second.degree, second.ready) == (2, False)
                assert second.num_programs - second.num_ready == missing
                assert client.generate("hello", SamplingParams(temperature=0, max_tokens=4))[0].token_ids
                code, text = code_and_text(
                    lambda: live.admin.Transform(pb.TransformRequest(tensor_parallel_size=2), timeout=TIMEOUT_S)
                )
                assert code is grpc.StatusCode.FAILED_PRECONDITION
                assert f"{missing} of its {second.num_programs} programs" in text
                wait_until(lambda: programs(live, "missing") == missing)
                opened.set()
                assert client.transform(2, wait_for_programs=True).tensor_parallel_size == 2
                wait_until(lambda: all(it.ready for it in client.cluster().degrees))
                wait_until(lambda: programs(live, "missing") == 0)
                assert programs(live, "ready") == second.num_programs
                assert client.transform(1).tensor_parallel_size == 1
        finally:
            opened.set()
        live.check_idle()


def test_a_warmup_beside_that_fails_is_an_error_in_the_log(caplog: pytest.LogCaptureFixture):
    """TP1 is ready before the engine fails to report its progress."""

    class Failing:
        asked = 0

        def warmup(self, degrees: list[int], background: bool) -> int:
            return 3

        @property
        def stats(self) -> EngineStats:
            self.asked += 1
            if self.asked > 1:
                raise MemoryError("no room for a program")
            return EngineStats(degrees=(DegreePrograms(1, 2, 2), DegreePrograms(2, 3, 1)))

    asyncio.run(_warm_up_beside(cast(LLM, Failing()), [1, 2]))
    (record,) = [record for record in caplog.records if record.name == "serving.commands.serve"]
    assert record.levelname == "ERROR"
    assert "cannot compile the programs of TP2" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], MemoryError)
