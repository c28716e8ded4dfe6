"""amoeba.v1.AdminService: the state of the cluster, and transformations while requests run."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from compile_gate import CompileGate
from harness import engine_of
from live_server import TIMEOUT_S, Live, code_and_text, wait_until
from prometheus_client import generate_latest

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.client import AsyncClient, Client
from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.views import InstanceStatus
from serving.commands import chat
from serving.grpc_server.transform_call import kinds_of
from serving.runtime.scheduling_config import SchedulingConfig

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_cluster_shows_instances_and_memory(live: Live):
    cluster = live.admin.GetCluster(pb.GetClusterRequest(), timeout=TIMEOUT_S)
    assert cluster.state == pb.SERVER_STATE_READY
    assert [(list(i.devices), i.tensor_parallel_size) for i in cluster.instances] == [([0], 1), ([1], 1)]
    assert all(d.weight_bytes and d.kv_bytes and d.weight_bytes + d.kv_bytes < d.budget_bytes for d in cluster.devices)
    assert (cluster.waiting, cluster.accepted) == (0, 0)
    stream = live.generate(text="hello", params=pb.SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
    next(stream)
    cluster = live.admin.GetCluster(pb.GetClusterRequest(), timeout=TIMEOUT_S)
    assert (sum(i.running for i in cluster.instances), cluster.accepted) == (1, 1)
    stream.cancel()
    live.check_idle()


def test_watch_repeats_until_the_client_leaves(live: Live):
    watch = live.admin.WatchCluster(pb.WatchClusterRequest(interval_s=0.1), timeout=TIMEOUT_S)
    assert [next(watch).state for _ in range(3)] == [pb.SERVER_STATE_READY] * 3
    watch.cancel()
    code, _ = code_and_text(lambda: next(live.admin.WatchCluster(pb.WatchClusterRequest(interval_s=0.01))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_instances_merge_and_split_while_a_request_runs(live: Live):
    params = pb.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    stream = live.generate(text="hello", params=params)
    tokens = list(next(stream).completions[0].token_ids)
    merged = live.admin.Transform(pb.TransformRequest(tensor_parallel_size=2), timeout=TIMEOUT_S)
    assert merged.tensor_parallel_size == 2
    assert merged.seconds > 0
    cluster = live.admin.GetCluster(pb.GetClusterRequest(), timeout=TIMEOUT_S)
    assert [i.tensor_parallel_size for i in cluster.instances] == [2]
    live.admin.Transform(pb.TransformRequest(tensor_parallel_size=1), timeout=TIMEOUT_S)
    tokens += [token for message in stream for c in message.completions for token in c.token_ids]
    expected = live.llm.generate("hello", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    assert tokens == list(expected[0].outputs[0].token_ids)
    live.check_idle()


@pytest.mark.slow
def test_requests_pause_while_another_runs_on_all_devices(live: Live):
    """GetCluster and the metrics count paused requests. These continue after the split with the same tokens."""
    params = pb.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    stream = live.generate(text="hello", params=params)
    tokens = list(next(stream).completions[0].token_ids)
    pause = pb.TransformRequest(tensor_parallel_size=2, running=pb.RUNNING_REQUESTS_PAUSE, release_weights=False)
    done = live.admin.Transform(pause, timeout=TIMEOUT_S)
    assert (done.paused, done.moved_bytes) == (1, 0)
    (instance,) = live.admin.GetCluster(pb.GetClusterRequest(), timeout=TIMEOUT_S).instances
    assert (instance.running, instance.paused, instance.paused_degree) == (0, 1, 1)
    wait_until(lambda: "amoeba:num_requests_paused 1.0" in generate_latest(live.server.metrics.registry).decode())
    short = pb.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    urgent = [t for m in live.generate(text="urgent", params=short) for c in m.completions for t in c.token_ids]
    assert live.admin.Transform(pb.TransformRequest(tensor_parallel_size=1), timeout=TIMEOUT_S).resumed == 1
    tokens += [token for message in stream for c in message.completions for token in c.token_ids]
    for text, found in (("hello", tokens), ("urgent", urgent)):
        asked = SamplingParams(temperature=0, max_tokens=len(found), ignore_eos=True)
        assert list(live.llm.generate(text, asked)[0].outputs[0].token_ids) == found
    live.check_idle()


def test_pausing_with_released_weights_is_a_failed_precondition(live: Live):
    request = pb.TransformRequest(tensor_parallel_size=2, running=pb.RUNNING_REQUESTS_PAUSE)
    code, text = code_and_text(lambda: live.admin.Transform(request, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "needs release_weights=False" in text


@pytest.mark.parametrize(
    "request_fields",
    [{"tensor_parallel_size": 4}, {"tensor_parallel_size": 3}, {"tensor_parallel_size": 2, "devices": [0]}, {}],
)
def test_impossible_degree_is_a_failed_precondition_and_changes_nothing(live: Live, request_fields: dict):
    before = live.llm.instances
    code, _ = code_and_text(lambda: live.admin.Transform(pb.TransformRequest(**request_fields), timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert live.llm.instances == before
    live.check_idle()


def test_transformation_beside_another_is_a_failed_precondition(live: Live):
    """One transformation waits for the running request. The other is refused meanwhile."""
    stream = live.generate(text="hello", params=pb.SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
    next(stream)
    ask = pb.TransformRequest(tensor_parallel_size=2, running=pb.RUNNING_REQUESTS_WAIT)
    both = [live.admin.Transform.future(ask, timeout=TIMEOUT_S) for _ in "ab"]
    wait_until(lambda: any(call.done() for call in both))
    assert sorted(call.done() for call in both) == [False, True]
    stream.cancel()
    codes = sorted(str(call.code()) for call in both)
    assert codes == ["StatusCode.FAILED_PRECONDITION", "StatusCode.OK"]
    live.admin.Transform(pb.TransformRequest(tensor_parallel_size=1), timeout=TIMEOUT_S)
    live.check_idle()


@pytest.mark.parametrize(
    ("degree", "devices", "kinds"),
    [
        (2, [0, 1, 2, 3], ["scale_down"]),
        (2, [4, 5], ["scale_up"]),
        (2, [], ["scale_up", "scale_down"]),
        (4, [], ["scale_up"]),
        (4, [0, 1, 2, 3], ["unchanged"]),
        (2, [99], ["scale_up", "scale_down"]),
    ],
)
def test_kind_of_a_transformation_is_that_of_the_instances_concerned(degree: int, devices: list[int], kinds: list[str]):
    groups = [(0, 1, 2, 3), (4,), (5,), (6,), (7,)]
    views = [InstanceStatus(g[0], g, len(g), 0, 0, 0, 8) for g in groups]
    assert kinds_of(views, degree, devices) == kinds


def test_a_refused_split_of_one_instance_is_counted_as_a_split(live: Live):
    """The other instances already have the lowest degree."""
    code_and_text(lambda: live.admin.Transform(pb.TransformRequest(tensor_parallel_size=4), timeout=TIMEOUT_S))
    live.admin.Transform(pb.TransformRequest(tensor_parallel_size=2), timeout=TIMEOUT_S)
    request = pb.TransformRequest(tensor_parallel_size=1, devices=[0])
    code, _ = code_and_text(lambda: live.admin.Transform(request, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    line = 'amoeba:transformations_total{kind="scale_down",result="refused",variant="in_place_overlapped"} 1.0'
    assert line in generate_latest(live.server.metrics.registry).decode().splitlines()
    live.admin.Transform(pb.TransformRequest(tensor_parallel_size=1), timeout=TIMEOUT_S)
    live.check_idle()


@pytest.mark.parametrize("field", ["variant", "running"])
def test_unknown_variant_is_invalid(live: Live, field: str):
    request = pb.TransformRequest(tensor_parallel_size=2, **{field: 99})  # type: ignore[arg-type]
    code, _ = code_and_text(lambda: live.admin.Transform(request, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_policy_needs_a_scheduler(live: Live):
    code, _ = code_and_text(lambda: live.admin.SetPolicy(pb.SetPolicyRequest(policy="amoeba"), timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture(scope="module")
def small_llm(served_model: Path, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with two instances of 256 tokens. The merged instance holds at least 512 tokens."""
    with LLM(
        served_model,
        num_devices=2,
        device_memory="64MiB",
        kv_cache_tokens=256,
        max_num_seqs=4,
        prefix_caching=False,
        progress=False,
        compile_cache=compile_cache,
    ) as llm:
        yield llm


@pytest.mark.slow
def test_a_transformation_that_waits_for_programs_shows_its_progress(
    start: Callable[..., Live],
    small_llm: LLM,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """GetCluster and `amoeba transform --wait` show the progress.

    Programs are missing because this is the engine's first transformation.
    """
    live, gate, printed = start(small_llm), CompileGate(small_llm), ""
    monkeypatch.setattr(chat, "_POLL_S", 0.05)
    monkeypatch.setattr(engine_of(small_llm).cluster.executables, "_beside", True)  # tests compile in place otherwise

    def said() -> str:
        nonlocal printed
        printed += "".join(capsys.readouterr())
        return printed

    with Client(live.target) as client, ThreadPoolExecutor(1) as pool:
        done = pool.submit(
            chat.run_transform,
            client,
            2,
            None,
            "in_place",
            keep_weights=False,
            running="migrate",
            order="memory_first",
            wait=True,
        )
        try:
            wait_until(lambda: "TP2, awaiting programs: " in said() or done.done())
            assert not done.done(), done.exception()
            (status,) = client.cluster().transformations
        finally:
            gate.open.set()
        done.result(TIMEOUT_S)
        assert client.cluster().transformations == ()
    assert (status.tensor_parallel_size, status.devices, status.state) == (2, (0, 1), "awaiting programs")
    assert f"{status.programs_left} left" in said()
    assert "s of waiting for programs" in said()
    small_llm.transform(1)
    live.check_idle()


def set_policy(live: Live, name: str) -> str:
    return live.admin.SetPolicy(pb.SetPolicyRequest(policy=name), timeout=TIMEOUT_S).previous_policy


def test_policies_are_switched(start: Callable[..., Live], small_llm: LLM):
    live = start(small_llm, scheduling=SchedulingConfig(policy="static"))
    for before, name in itertools.pairwise(["static", "round_robin", "least_load_first", "amoeba", "static"]):
        assert set_policy(live, name) == before
        assert live.scheduling is not None
        assert live.scheduling.policy_name == name
        assert sum(len(message.completions[0].token_ids) for message in live.generate(text="hello")) == 8
    code, text = code_and_text(lambda: set_policy(live, "no one"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "no one" in text
    assert "round_robin" in text
    assert set_policy(live, "static") == "static"
    live.check_idle()


@pytest.mark.slow
def test_a_long_request_has_instances_merged_and_split_again(start: Callable[..., Live], small_llm: LLM):
    """The long request exceeds one instance, and short requests keep running. `static` refuses it."""
    prompt = "a long prompt. " * 24
    long, short = pb.SamplingParams(temperature=0, max_tokens=40), pb.SamplingParams(temperature=0, max_tokens=200)
    small_llm.transform(2)
    expected = small_llm.generate(prompt, SamplingParams(temperature=0, max_tokens=40))[0].outputs[0].token_ids
    small_llm.transform(1)
    beside = small_llm.generate("hello", SamplingParams(temperature=0, max_tokens=200))[0].outputs[0].token_ids

    live = start(small_llm, scheduling=SchedulingConfig(policy="static", linger_s=0.2))
    code, _ = code_and_text(lambda: list(live.generate(text=prompt, params=long)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    set_policy(live, "amoeba")
    streams = [live.generate(text="hello", params=short) for _ in range(2)]
    received = [[*next(stream).completions[0].token_ids] for stream in streams]
    messages = list(live.generate(text=prompt, params=long))
    assert [token for message in messages for token in message.completions[0].token_ids] == list(expected)
    for tokens, stream in zip(received, streams, strict=True):
        assert tokens + [t for message in stream for t in message.completions[0].token_ids] == list(beside)
    wait_until(lambda: [view.tensor_parallel_size for view in small_llm.instances] == [1, 1])
    assert live.scheduling is not None
    counters = live.scheduling.counters
    assert (counters.scale_ups, counters.scale_downs, counters.transformations_failed) == (1, 1, 0)
    lines = [
        f'amoeba:transformations_total{{kind="{kind}",result="done",variant="in_place_overlapped"}} 1.0'
        for kind in ("scale_up", "scale_down")
    ]
    # The metrics show the engine's last report, which may be older.
    wait_until(lambda: set(lines) <= set(generate_latest(live.server.metrics.registry).decode().splitlines()))
    live.check_idle()


def test_admin_service_has_its_own_port(start: Callable[..., Live]):
    live = start(admin_port=0)
    code, _ = code_and_text(lambda: live.admin.GetCluster(pb.GetClusterRequest(), timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    with grpc.insecure_channel(f"127.0.0.1:{live.server.admin_port}") as channel:
        from amoeba_jax.client._proto.inference_pb2_grpc import AdminServiceStub, InferenceServiceStub

        assert AdminServiceStub(channel).GetCluster(pb.GetClusterRequest(), timeout=TIMEOUT_S).instances
        code, _ = code_and_text(lambda: InferenceServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest()))
        assert code is grpc.StatusCode.UNIMPLEMENTED


def test_client_sets_the_policy(start: Callable[..., Live]):
    live = start(scheduling=SchedulingConfig(policy="static"))
    with Client(live.target) as client:
        assert client.set_policy("amoeba", timeout_s=TIMEOUT_S) == "static"

    async def ask() -> str:
        async with AsyncClient(live.target) as client:
            return await client.set_policy("round_robin", timeout_s=TIMEOUT_S)

    assert asyncio.run(ask()) == "amoeba"
