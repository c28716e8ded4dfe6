"""Requests sent to a real server, and their records."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from live_server import TIMEOUT_S, Live

from amoeba_jax import SamplingParams
from amoeba_jax.client import AsyncClient
from serving.bench.cluster_watch import ClusterWatch, count_transformations
from serving.bench.load import Load, LoadConfig, Outcome
from serving.bench.workload import PlannedRequest
from serving.grpc_server.calls import Call
from serving.grpc_server.output_coalescer import Send

pytestmark = pytest.mark.usefixtures("quick_compile")


def planned(*lengths: tuple[int, int], arrival_s: float = 0.0) -> list[PlannedRequest]:
    return [PlannedRequest(i, "random", arrival_s, prompt, output) for i, (prompt, output) in enumerate(lengths)]


def run_load(live: Live, requests: list[PlannedRequest], stop_at: str | None = None, **settings: int) -> Load:
    """Send requests, and stop when a request of the kind `stop_at` has ended."""

    async def run() -> Load:
        async with AsyncClient(live.target) as client:
            load, stop = Load(client, await client.model_info(), LoadConfig(**settings)), asyncio.Event()

            def on_end(record) -> None:
                if record.request.kind == stop_at:
                    stop.set()

            await asyncio.wait_for(load.run(requests, stop, on_end), TIMEOUT_S)
            return load

    return asyncio.run(run())


def test_every_request_gets_the_tokens_of_its_prompt(live: Live, monkeypatch: pytest.MonkeyPatch):
    requests = planned((5, 4), (300, 9), (40, 1))
    sent: dict[str, tuple[list[int], SamplingParams]] = {}
    serve = live.server.request_handler.serve

    async def watched(call: Call, send: Send) -> None:
        assert isinstance(call.prompt, list)
        sent[call.name] = call.prompt, call.params
        await serve(call, send)

    with monkeypatch.context() as patch:
        patch.setattr(live.server.request_handler, "serve", watched)
        records = run_load(live, requests, seed=3).records
    assert len(sent) == 3
    for request, record in zip(requests, records, strict=True):
        prompt, params = sent[f"bench-{request.index}"]
        assert prompt == request.prompt(3, 256)
        assert len(prompt) == request.input_len
        assert (params.max_tokens, params.ignore_eos, params.temperature) == (request.output_len, True, 0.0)
        assert (record.outcome, record.error) == (Outcome.COMPLETED, "")
        assert record.output_tokens == request.output_len
        moments = [record.arrival_s, record.start_s, *record.chunk_times, record.end_s]
        assert moments == sorted(moments)  # type: ignore[type-var]
    live.check_idle()


def test_a_request_that_fails_says_why_and_ends_nothing(live: Live):
    failed, *others = run_load(live, planned((4000, 400), (8, 8), (9, 9))).records
    assert (failed.outcome, failed.status) == (Outcome.FAILED, "INVALID_ARGUMENT")
    assert "4400" in failed.error or "4000" in failed.error
    assert (failed.ttft_s, failed.e2el_s, failed.tpot_s, failed.output_tokens) == (None, None, None, 0)
    assert [record.outcome for record in others] == [Outcome.COMPLETED] * 2
    live.check_idle()


def test_a_server_that_is_not_there_fails_every_request(live: Live):
    async def run() -> Load:
        async with AsyncClient(live.target) as client:
            model = await client.model_info()
        async with AsyncClient("127.0.0.1:1") as client:
            load = Load(client, model, LoadConfig())
            await load.run(planned((3, 3), (3, 3)), asyncio.Event())
            return load

    assert [(r.outcome, r.status) for r in asyncio.run(run()).records] == [(Outcome.FAILED, "UNAVAILABLE")] * 2


def test_aborted_at_the_server_is_a_failure(live: Live):
    requests = [PlannedRequest(0, "endless", 0.0, 5, 3000), PlannedRequest(1, "short", 0.0, 5, 2)]

    async def run() -> Load:
        async with AsyncClient(live.target) as client:
            load = Load(client, await client.model_info(), LoadConfig())
            aborts = []

            def on_end(record) -> None:
                if record.request.kind == "short":
                    aborts.append(asyncio.ensure_future(client.abort("bench-0")))

            await asyncio.wait_for(load.run(requests, asyncio.Event(), on_end), TIMEOUT_S)
            assert await aborts[0]
            return load

    endless, short = asyncio.run(run()).records
    assert (short.outcome, endless.outcome, endless.status) == (Outcome.COMPLETED, Outcome.FAILED, "CANCELLED")
    assert "aborted" in endless.error
    live.check_idle()


def test_stopping_ends_what_runs_and_sends_no_more(live: Live):
    requests = [
        PlannedRequest(0, "endless", 0.0, 5, 3000),
        PlannedRequest(1, "short", 0.0, 5, 2),
        PlannedRequest(2, "never", 1000.0, 5, 2),
    ]
    load = run_load(live, requests, stop_at="short")
    assert [(r.request.kind, r.outcome) for r in load.records] == [
        ("endless", Outcome.INTERRUPTED),
        ("short", Outcome.COMPLETED),
    ]
    assert load.records[0].end_s is not None
    live.check_idle()


def test_no_more_run_at_once_than_allowed(live: Live):
    records = run_load(live, planned(*[(5, 6)] * 6), max_concurrency=2).records
    assert {record.outcome for record in records} == {Outcome.COMPLETED}
    starts, ends = (np.array([getattr(r, name) for r in records]) for name in ("start_s", "end_s"))
    assert max(int(((starts <= t) & (t < ends)).sum()) for t in starts) == 2
    assert all(r.queue_s is not None and r.queue_s >= 0 for r in records)
    assert sum(r.start_s >= sorted(ends)[0] for r in records) == 4, "four had to wait"


def test_requests_come_at_their_times(live: Live):
    requests = [PlannedRequest(i, "random", 0.2 * i, 5, 2) for i in range(3)]
    records = run_load(live, requests).records
    assert all(record.arrival_s >= request.arrival_s for record, request in zip(records, requests, strict=True))


def test_merges_and_splits_are_seen_while_they_happen(live: Live):
    async def run() -> ClusterWatch:
        ticks: asyncio.Queue[float] = asyncio.Queue()

        def clock() -> float:
            ticks.put_nowait(float(ticks.qsize()))
            return asyncio.get_running_loop().time()

        async def next_samples() -> None:
            while not ticks.empty():
                ticks.get_nowait()
            for _ in range(2):  # the first sample may have been in flight
                await asyncio.wait_for(ticks.get(), TIMEOUT_S)

        async with AsyncClient(live.target) as client:
            watch = ClusterWatch()
            following = asyncio.ensure_future(watch.follow(client, 0.1, clock))
            await next_samples()
            for degree in (2, 1):
                await client.transform(degree)
                await next_samples()
            following.cancel()
            await asyncio.wait([following])
            return watch

    watch = asyncio.run(run())
    assert watch.problem is None
    assert count_transformations(watch.samples) == (1, 1)
    assert watch.samples[0].devices == watch.samples[-1].devices == ((0,), (1,))
    assert ((0, 1),) in {sample.devices for sample in watch.samples}


@pytest.mark.parametrize(
    ("settings", "status"), [({"api_token": "t0k3n"}, "PERMISSION_DENIED"), ({"admin_port": 0}, "UNIMPLEMENTED")]
)
def test_instances_that_cannot_be_watched_are_a_note(start: Callable[..., Live], settings: dict, status: str):
    live = start(**settings)

    async def run() -> ClusterWatch:
        async with AsyncClient(live.target, token="t0k3n") as client:
            watch = ClusterWatch()
            await asyncio.wait_for(watch.follow(client, 0.1, lambda: 0.0), TIMEOUT_S)
            return watch

    watch = asyncio.run(run())
    assert watch.problem is not None
    assert watch.problem.startswith(status)
    assert watch.samples == []
