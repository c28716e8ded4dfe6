"""Many concurrent streams while instances merge and split. Some streams are canceled."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from device_memory import total_live_bytes
from live_server import TIMEOUT_S, Live, wait_until
from tiny_models import byte_model

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.client import Client
from amoeba_jax.client._proto import inference_pb2 as pb
from serving.runtime.scheduling_config import SchedulingConfig

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_streams_are_right_while_instances_change(live: Live, count: int):
    choose = random.Random(7)
    prompts = ["x" * choose.choice((1, 5, 40, 300)) + str(index) for index in range(count)]
    params = [SamplingParams(temperature=0, max_tokens=choose.choice((1, 8, 60))) for _ in prompts]
    cancelled = set(choose.sample(range(count), count // 10))

    with Client(live.target) as client, ThreadPoolExecutor(count + 1) as threads:

        def ask(index: int) -> tuple[int, ...]:
            tokens: tuple[int, ...] = ()
            for chunk in client.stream(prompts[index], params[index], timeout_s=10 * TIMEOUT_S):
                tokens += chunk.token_ids
                if index in cancelled:
                    break
            return tokens

        answers = [threads.submit(ask, index) for index in range(count)]
        degrees = [2, 1]
        while not all(answer.done() for answer in answers):
            degrees.append(degrees[-2])
            try:
                client.transform(degrees[-1], timeout_s=TIMEOUT_S)
            except grpc.RpcError as error:  # refused if one instance cannot hold all running requests
                assert error.code() is grpc.StatusCode.FAILED_PRECONDITION, error  # type: ignore[attr-defined]  # noqa: PT017
                degrees.pop()
        assert len(degrees) > 2, "instances have changed"
    if live.llm.instances[0].tensor_parallel_size == 2:
        live.llm.transform(1)
    expected = [output.outputs[0].token_ids for output in live.llm.generate(prompts, params)]
    for index, answer in enumerate(answers):
        tokens = answer.result()
        assert tokens == expected[index][: len(tokens)]
        assert len(tokens) == len(expected[index]) or index in cancelled
    live.check_idle()


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_requests_with_short_deadlines_leave_nothing_behind(live: Live, count: int):
    """The client's gRPC and the server's time limit end a request at the same moment."""
    choose = random.Random(3)
    endless = pb.SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
    timeouts = [choose.uniform(0.05, 0.15) for _ in range(count)]

    def ask(index: int) -> grpc.StatusCode:
        try:
            list(live.generate(text=f"request {index}", params=endless, timeout=timeouts[index]))
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined]
        return grpc.StatusCode.OK

    with ThreadPoolExecutor(50) as threads:
        codes = set(threads.map(ask, range(count)))
    assert codes <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OK}
    live.check_idle()
    door = live.server.request_handler
    wait_until(lambda: not door._generating and not door._closing)


CACHE = 512
"""Tokens that a device holds beside all weights."""


@pytest.fixture(params=[4, 8])
def llm(request: pytest.FixtureRequest, tmp_path: Path, compile_cache: str) -> Iterator[LLM]:
    """Yield a four-layer engine with an instance for each device. On eight devices, two groups change independently."""
    with LLM(
        byte_model(tmp_path / "deeper", num_hidden_layers=4),
        num_devices=request.param,
        device_memory="16MiB",
        kv_cache_tokens=CACHE,
        page_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        progress=False,
        prefix_caching=False,
        compile_cache=compile_cache,
    ) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_streams_are_right_while_the_scheduler_changes_instances(llm: LLM, start: Callable[..., Live]):
    """Between the short requests are bursts of long requests, which no single device can hold."""
    live = start(llm, scheduling=SchedulingConfig(linger_s=0.5, layers_per_step=2))
    choose = random.Random(11)
    count = 300
    lengths = [choose.choice((1, 20, 80, 300)) if index % 100 < 90 else 2 * CACHE for index in range(count)]
    prompts = ["".join(choose.choices("abcdefgh ", k=length)) for length in lengths]
    params = [SamplingParams(temperature=0, max_tokens=choose.choice((1, 8, 60)), ignore_eos=True) for _ in prompts]
    cancelled = set(choose.sample(range(count), count // 10))

    def ask(client: Client, index: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        for chunk in client.stream(prompts[index], params[index], timeout_s=3000):
            tokens += chunk.token_ids
            if index in cancelled:
                break
        return tokens

    def serve_all() -> list[tuple[int, ...]]:
        with Client(live.target) as client, ThreadPoolExecutor(count) as threads:
            return list(threads.map(lambda index: ask(client, index), range(count)))

    def all_split() -> bool:
        return all(view.tensor_parallel_size == 1 for view in llm.instances)

    assert live.scheduling is not None
    counters = live.scheduling.counters
    memory = []
    for _ in range(2):
        answers = serve_all()
        wait_until(all_split)
        live.check_idle()
        memory.append(total_live_bytes())
    assert counters.scale_ups == counters.scale_downs >= 2
    assert memory[1] <= memory[0] + (64 << 10), "what a step's inputs and outputs take comes and goes"
    live.scheduling.close()
    llm.transform(4)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    for index, tokens in enumerate(answers):
        assert tokens == expected[index][: len(tokens)]
        assert len(tokens) == params[index].max_tokens or index in cancelled
