"""Clients that are refused repeatedly get their answers late. Other clients get answers at once."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest
from live_server import Live, code_and_text

from amoeba_jax.client._proto import inference_pb2 as pb
from serving.grpc_server.config import Limits
from serving.grpc_server.refusals import GIVEN_UP_WITHIN_S, MAX_DELAY_S, Refusals
from serving.grpc_server.statuses import LimitError

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
def refusals() -> Refusals:
    return Refusals(Limits(max_refusals_per_second=10))


def test_a_burst_is_answered_at_once(refusals: Refusals):
    assert all(refusals.delay_s("a", 5.0) <= 0 for _ in range(40))
    assert refusals.delay_s("a", 5.0) == pytest.approx(0.1)


def test_delays_grow_to_a_limit_and_are_forgotten(refusals: Refusals):
    delays = [refusals.delay_s("a", 5.0) for _ in range(1000)]
    assert delays == sorted(delays)
    assert delays[-1] == pytest.approx(MAX_DELAY_S)
    assert refusals.delay_s("a", 5.0 + MAX_DELAY_S + 4) <= 0


def test_a_steady_rate_below_the_limit_is_never_delayed(refusals: Refusals):
    assert all(refusals.delay_s("a", i / 9) <= 0 for i in range(500))


def test_clients_are_counted_apart(refusals: Refusals):
    for _ in range(1000):
        refusals.delay_s("a", 5.0)
    assert refusals.delay_s("b", 5.0) <= 0


def test_clients_that_have_gone_are_forgotten(refusals: Refusals):
    for i in range(5000):
        refusals.delay_s(f"client {i}", float(i))
    assert len(refusals._paid_until_s) <= 1024


def test_what_is_given_up_late_is_not_counted(refusals: Refusals):
    for _ in range(1000):
        refusals.given_up("a", GIVEN_UP_WITHIN_S + 0.01)
    assert refusals.delay_s("a", time.monotonic()) <= 0


def test_requests_of_who_gives_up_begin_late_and_not_too_many_wait(refusals: Refusals):
    async def run() -> tuple[float, float, int, int]:
        for _ in range(1000):
            refusals.given_up("a", 0.01)
        start = time.monotonic()
        await refusals.before_request("b")
        other = time.monotonic() - start
        results = await asyncio.gather(*(refusals.before_request("a") for _ in range(100)), return_exceptions=True)
        refused = sum(isinstance(result, LimitError) for result in results)
        return other, time.monotonic() - start, refused, sum(result is None for result in results)

    other, whole, refused, begun = asyncio.run(run())
    assert other < 0.5 < whole
    assert (refused, begun) == (36, 64)
    assert not refusals._held


def test_a_server_begins_requests_late_for_a_client_that_gives_up(start: Callable[..., Live]):
    live = start(max_refusals_per_second=1)
    paid_until_s = live.server.request_handler.refusals._paid_until_s
    request = pb.GenerateRequest(text="x", params=pb.SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(200):  # not every request is canceled early enough to count
        call = live.inference.Generate(request)
        next(call)
        call.cancel()
        if max(paid_until_s.values(), default=0.0) > time.monotonic() + 4.5:
            break
    else:
        pytest.fail("it does not count what is given up")
    begin = time.monotonic()
    assert list(live.inference.Generate(request)), "late, and served"
    assert time.monotonic() - begin > 0.2
    live.check_idle()


def _wrong_calls(live: Live, count: int, metadata: tuple[tuple[str, str], ...] = ()) -> float:
    """Return the seconds that `count` refused calls take, eight at a time."""

    def call(_: int) -> grpc.StatusCode:
        request = pb.TokenizeRequest(text="x", model="another")
        return code_and_text(lambda: live.inference.Tokenize(request, metadata=metadata))[0]

    start = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(call, range(count))) == {grpc.StatusCode.NOT_FOUND}
    return time.monotonic() - start


def test_a_server_delays_the_client_that_errs_and_no_other(start: Callable[..., Live]):
    live = start(api_token=("red", "blue"), max_refusals_per_second=5)
    red, blue = ((("authorization", f"Bearer {name}"),) for name in ("red", "blue"))
    _wrong_calls(live, 20, red)  # use up the burst
    # Each delay is at most one second. With eight calls at a time, 24 more calls take at least two seconds.
    assert _wrong_calls(live, 24, red) > 1.5
    refusals = live.server.request_handler.refusals
    assert len(refusals._paid_until_s) == 1
    assert not refusals._held
    request = pb.TokenizeRequest(text="x", model="another")
    code_and_text(lambda: live.inference.Tokenize(request, metadata=blue))
    by_client = refusals._paid_until_s.values()
    assert min(by_client) < max(by_client) - 2


def test_wrong_tokens_are_counted_by_address(start: Callable[..., Live]):
    live = start(api_token="red", max_refusals_per_second=5)
    for token in ("a", "b"):
        request, metadata = pb.GetModelInfoRequest(), (("authorization", f"Bearer {token}"),)
        code, _ = code_and_text(partial(live.inference.GetModelInfo, request, metadata=metadata))
        assert code is grpc.StatusCode.UNAUTHENTICATED
    assert len(live.server.request_handler.refusals._paid_until_s) == 1
