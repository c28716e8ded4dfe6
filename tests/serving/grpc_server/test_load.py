"""Many streams at once, some cancelled, while instances merge and split."""

import random
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from live_server import TIMEOUT_S, Live

from amoeba_jax import SamplingParams
from amoeba_jax.client import Client

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("count", [80, pytest.param(300, marks=pytest.mark.slow)])
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
            except grpc.RpcError as error:  # refused where one instance could not take all that run
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
