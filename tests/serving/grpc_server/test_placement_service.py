"""Changes of a placement over gRPC while requests run: the calls, the clients, the commands and the metrics."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from live_server import TIMEOUT_S, Live, LoopThread, code_and_text, wait_until
from prometheus_client import generate_latest
from tiny_models import byte_model
from typer.testing import CliRunner

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.client import AsyncClient, Client
from amoeba_jax.client._proto import inference_pb2 as pb
from amoeba_jax.client.results import PlacementChange, read_placement
from amoeba_jax.errors import RequestError
from serving.cli import app
from serving.commands.placement_run import draw, parse_layers
from serving.grpc_server.messages import placement_message
from sharding.placement import Home, Placement

pytestmark = pytest.mark.usefixtures("quick_compile")

NUM_LAYERS = 4
ONE = {"head": [0], "stages": [{"layers": [0, NUM_LAYERS], "homes": [[0]]}]}
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
LAYERS = pb.LayerRange(first=1, end=3)
REPLICATED = Placement.uniform(Home(0, 1), NUM_LAYERS, 2).with_modules(range(1, 3), "layer", (Home(0, 1), Home(1, 1)))


@pytest.fixture(scope="module")
def placed_llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Yield an engine with one instance, on device 0 of four."""
    model = byte_model(tmp_path_factory.mktemp("placed") / "tiny-chat", num_hidden_layers=NUM_LAYERS)
    with LLM(
        model,
        num_devices=4,
        placement=ONE,
        device_memory="64MiB",
        kv_cache_tokens=2048,
        max_num_seqs=4,
        prefix_caching=False,
        progress=False,
        compile_cache=compile_cache,
    ) as llm:
        yield llm


@pytest.fixture
def placed(start: Callable[..., Live], placed_llm: LLM) -> Iterator[Live]:
    """Yield a server of this engine, and check that the test has restored the placement."""
    yield start(placed_llm)
    assert [it.devices for it in placed_llm.instances] == [(0,)]
    assert placed_llm.placement() == Placement.uniform(Home(0, 1), NUM_LAYERS)


# The calls


def test_layers_replicate_and_leave_again_while_a_request_runs(placed: Live):
    expected = placed.llm.generate("hello", LONG)[0].outputs[0].token_ids
    with Client(placed.target) as client:
        stream = client.stream("hello", LONG)
        tokens = [*next(stream).token_ids]
        done = client.replicate(range(1, 3), 1)
        assert isinstance(done, PlacementChange)
        assert (done.kind, done.instance, done.device, done.layers) == ("replicate", 0, 1, (1, 3))
        assert done.seconds > 0
        assert done.copied_bytes > 0
        assert (done.shared_bytes, done.recomputed) == (0, 0)
        assert len(done.device_bytes_delta) == 4
        assert done.device_bytes_delta[1] >= done.copied_bytes
        (instance,) = client.cluster().instances
        assert instance.placement is not None
        assert instance.placement.parallelism() == [1, 2, 2, 1]
        assert (instance.placement.num_microbatches, client.cluster().placements) == (2, ())
        assert client.placement() == instance.placement == placed.llm.placement()
        left = client.evict(range(1, 3), 1)
        assert left.device_bytes_delta[1] == -done.device_bytes_delta[1]
        tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == list(expected)
    placed.check_idle()


@pytest.mark.parametrize(
    ("modules", "move_kv"), [("layer", True), ("attention", True), ("ffn", True), ("layer", False)]
)
def test_layers_migrate_and_come_back(placed: Live, modules: str, move_kv: bool):
    with Client(placed.target) as client:
        stream = client.stream("hello", LONG)
        count = len(next(stream).token_ids)
        there = client.migrate(range(0, 2), 1, modules=modules, move_kv=move_kv)
        assert there.copied_bytes > 0
        assert (there.kv_moved_bytes > 0) == (modules != "ffn" and move_kv)
        back = client.migrate(range(0, 2), 0, modules="ffn" if not move_kv else modules)
        assert back.device_bytes_delta[1] == -there.device_bytes_delta[1]
        assert count + sum(len(chunk.token_ids) for chunk in stream) == LONG.max_tokens
    placed.check_idle()


def test_attention_moves_with_its_kv_cache_and_leaves_its_weights_at_the_source(placed: Live):
    with Client(placed.target) as client:
        assert client.migrate(range(0, 2), 1, modules="kv").copied_bytes > 0
        back = client.migrate(range(0, 2), 0, modules="attention")
        assert back.shared_bytes > 0
        assert back.copied_bytes == 0
    placed.check_idle()


def test_an_empty_device_becomes_an_instance_and_ends_again(placed: Live):
    with Client(placed.target) as client:
        out = client.scale_out(1)
        assert (out.kind, out.device, out.layers) == ("scale_out", 1, (0, NUM_LAYERS))
        assert [it.devices for it in client.cluster().instances] == [(0,), (1,)]
        assert client.placement(1) == Placement.uniform(Home(1, 1), NUM_LAYERS)
        assert client.scale_in(1, instance=0).kind == "scale_in"
        assert [it.devices for it in client.cluster().instances] == [(0,)]
    placed.check_idle()


def test_asyncio_client_does_the_same(placed: Live):
    async def use() -> list[str]:
        async with AsyncClient(placed.target) as client:
            done = [
                await client.replicate(range(1, 3), 1),
                await client.evict(range(1, 3), 1),
                await client.migrate(range(1, 3), 1, move_kv=True),
                await client.migrate(range(1, 3), 0),
                await client.scale_out(2),
                await client.scale_in(2),
            ]
            assert (await client.placement()).num_layers == NUM_LAYERS
            return [it.kind for it in done]

    assert asyncio.run(use()) == ["replicate", "evict", "migrate", "migrate", "scale_out", "scale_in"]
    placed.check_idle()


def test_changes_go_on_without_their_client(placed: Live):
    call = placed.admin.Replicate.future(pb.ReplicateRequest(layers=LAYERS, device=1), timeout=TIMEOUT_S)
    with Client(placed.target) as client:
        client.placement()  # the server has received the first call
        call.cancel()
        wait_until(lambda: client.placement().num_microbatches == 2)
        client.evict(range(1, 3), 1)
    placed.check_idle()


# Refused calls

WRONG: dict[str, tuple[str, Any, str]] = {
    "no layers": ("Replicate", pb.ReplicateRequest(device=1), "layers=missing"),
    "layers backwards": ("Evict", pb.EvictRequest(layers=pb.LayerRange(first=3, end=1), device=1), r"layers=\[3, 1\)"),
    "no layer": ("Migrate", pb.MigrateRequest(layers=pb.LayerRange(first=2, end=2), device=1), r"layers=\[2, 2\)"),
    "layers beyond the model": (
        "Replicate",
        pb.ReplicateRequest(layers=pb.LayerRange(first=0, end=NUM_LAYERS + 1), device=1),
        f"end at most {NUM_LAYERS}",
    ),
    "a device too many": ("Replicate", pb.ReplicateRequest(layers=LAYERS, device=4), "device=4 must be from 0 to 3"),
    "the largest device": ("ScaleOut", pb.ScaleOutRequest(device=2**32 - 1), "device=4294967295"),
    "an instance too many": ("ScaleIn", pb.ScaleInRequest(device=1, instance=4), "instance=4 must be from 0 to 3"),
    "unknown modules": (
        "Migrate",
        pb.MigrateRequest(layers=LAYERS, device=1, modules=99),  # type: ignore[arg-type]
        "modules=99 is not known: it must be one of 0",
    ),
    "the placement of an instance too many": ("GetPlacement", pb.GetPlacementRequest(instance=4), "from 0 to 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_that_no_server_of_this_size_has_are_invalid(placed: Live, name: str):
    method, request, message = WRONG[name]
    code, text = code_and_text(lambda: getattr(placed.admin, method)(request, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert re.search(message, text)
    placed.check_idle()


@pytest.mark.parametrize(
    ("method", "request_fields"),
    [
        ("Replicate", {"layers": LAYERS, "device": 0}),  # its own device
        ("Replicate", {"layers": LAYERS, "device": 1, "instance": 3}),
        ("Evict", {"layers": LAYERS, "device": 1}),  # no replica there
        ("Evict", {"layers": LAYERS, "device": 0}),  # the only copy
        ("Migrate", {"layers": LAYERS, "device": 0}),
        ("ScaleOut", {"device": 0}),
        ("ScaleOut", {"device": 1, "instance": 2}),
        ("ScaleIn", {"device": 0}),
        ("ScaleIn", {"device": 2}),
        ("GetPlacement", {"instance": 3}),
    ],
)
def test_changes_that_are_not_possible_now_are_failed_preconditions(placed: Live, method: str, request_fields: dict):
    before = placed.llm.memory().entries
    request = getattr(pb, f"{method}Request")(**request_fields)
    code, text = code_and_text(lambda: getattr(placed.admin, method)(request, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert text
    assert placed.llm.memory().entries == before
    placed.check_idle()


def test_an_instance_of_several_devices_is_not_replicated(live: Live):
    live.admin.Transform(pb.TransformRequest(tensor_parallel_size=2), timeout=TIMEOUT_S)
    request = pb.MigrateRequest(layers=pb.LayerRange(end=1), device=1)
    code, text = code_and_text(lambda: live.admin.Migrate(request, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "Split" in text
    live.admin.Transform(pb.TransformRequest(tensor_parallel_size=1), timeout=TIMEOUT_S)
    live.check_idle()


ADMIN_CALLS = [
    ("GetPlacement", pb.GetPlacementRequest()),
    ("Replicate", pb.ReplicateRequest(layers=pb.LayerRange(end=1), device=1)),
    ("Evict", pb.EvictRequest(layers=pb.LayerRange(end=1), device=1)),
    ("Migrate", pb.MigrateRequest(layers=pb.LayerRange(end=1), device=1)),
    ("ScaleOut", pb.ScaleOutRequest(device=1)),
    ("ScaleIn", pb.ScaleInRequest(device=1)),
]


@pytest.mark.parametrize(("method", "request_message"), ADMIN_CALLS)
def test_calls_need_the_admin_token(start: Callable[..., Live], method: str, request_message: Any):
    live = start(api_token="sesame", admin_token="root")
    call = getattr(live.admin, method)
    code, _ = code_and_text(lambda: call(request_message, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    metadata = (("authorization", "Bearer sesame"),)
    code, _ = code_and_text(lambda: call(request_message, metadata=metadata, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(("method", "request_message"), ADMIN_CALLS)
def test_a_server_that_loads_is_unavailable(start: Callable[..., Live], method: str, request_message: Any):
    live = start(attach=False)
    code, _ = code_and_text(lambda: getattr(live.admin, method)(request_message, timeout=TIMEOUT_S))
    assert code is grpc.StatusCode.UNAVAILABLE


# The clients refuse arguments before they send anything. Nothing listens on the port.

BAD_ARGUMENTS: list[tuple[Callable[..., Any], str]] = [
    (lambda client: client.replicate(range(3, 1), 1), "at least one layer"),
    (lambda client: client.replicate(range(0, 4, 2), 1), "at least one layer"),
    (lambda client: client.replicate([1, 2], 1), "at least one layer"),
    (lambda client: client.replicate(range(-2, 2), 1), "layers=-2 must be"),
    (lambda client: client.evict(range(2**40), 1), "layers=1099511627776 must be"),
    (lambda client: client.migrate(range(2), -1), "device=-1 must be"),
    (lambda client: client.migrate(range(2), True), "device=True must be"),
    (lambda client: client.migrate(range(2), 1, modules="head"), "must be one of layer, attention, ffn, kv"),
    (lambda client: client.scale_out(1.5), "device=1.5 must be"),
    (lambda client: client.scale_in(1, -1), "instance=-1 must be"),
    (lambda client: client.placement(2**31), "instance=2147483648 must be"),
]


@pytest.mark.parametrize(("call", "message"), BAD_ARGUMENTS)
def test_clients_refuse_bad_arguments(call: Callable[..., Any], message: str, loop: LoopThread):
    with Client("127.0.0.1:1") as client, pytest.raises(RequestError, match=re.escape(message)):
        call(client)

    async def run() -> None:
        async with AsyncClient("127.0.0.1:1") as client:
            await call(client)

    with pytest.raises(RequestError, match=re.escape(message)):
        loop.run(run())


# Messages


PLACEMENTS = {
    "one home": Placement.uniform(Home(0, 1), 4),
    "four devices together": Placement.uniform(Home(0, 4), 4),
    "two microbatches at one home": Placement.uniform(Home(1, 1), 4, 2),
    "layers replicated": REPLICATED,
    "ffn on another device": Placement.uniform(Home(0, 1), 4).with_modules(range(0, 1), "ffn", (Home(3, 1),)),
    "the head on its own": Placement.uniform(Home(1, 1), 4).with_head(Home(0, 1)),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements_survive_the_wire(name: str):
    message = pb.Placement.FromString(placement_message(PLACEMENTS[name]).SerializeToString())
    assert read_placement(message) == PLACEMENTS[name]


# The commands


@pytest.mark.parametrize(
    ("text", "layers"), [("7", range(7, 8)), ("5-14", range(5, 15)), (" 0-0 ", range(1)), ("000-1", range(2))]
)
def test_layers_of_commands(text: str, layers: range):
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "1-2-3", "1,2", "1.5", "9" * 5000, "٣"])
def test_bad_layers_exit_with_2_and_one_line(text: str):
    result = CliRunner().invoke(app, ["replicate", "--target", "127.0.0.1:1", "--", text, "1"])
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: layers ")
    assert len(line) < 200


@pytest.mark.parametrize("command", ["replicate", "evict", "migrate", "scale-out", "scale-in"])
def test_negative_devices_are_refused_as_options(command: str):
    layers = [] if command.startswith("scale") else ["0-1"]
    result = CliRunner().invoke(app, [command, "--", *layers, "-1"])
    assert result.exit_code == 2
    assert "'device'" in result.stderr


DRAWING = """\
           0
device 0   ████
device 1   ·██·
layers 0: TP1[0]   1-2: TP1[0], TP1[1]   3: TP1[0]
embedding and head TP1[0]; 2 microbatches"""


def test_drawings_have_a_row_for_each_device():
    assert draw(REPLICATED, 80) == DRAWING


def test_drawings_tell_modules_apart_and_break_where_the_terminal_ends():
    placement = Placement.uniform(Home(0, 1), 25).with_modules(range(20, 25), "ffn", (Home(1, 1),))
    lines = draw(placement, 34).splitlines()
    assert lines[:3] == ["           0         10", "device 0   " + "█" * 20, "device 1   " + "·" * 20]
    assert lines[3:6] == ["           20", "device 0   AAAAA", "device 1   FFFFF"]


def test_commands_change_and_show_the_placement(placed: Live):
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "--target", placed.target])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert run("replicate", "1-2", "1").startswith("replicated layers 1-2 of instance 0 on device 1 in ")
    shown = run("placement")
    assert shown == f"instance 0\n{DRAWING}\n"
    assert run("placement", "--instance", "0") == shown
    data = json.loads(run("placement", "--instance", "0", "--json"))
    assert Placement.from_data(data, NUM_LAYERS, 4, 4) == REPLICATED
    assert json.loads(run("placement", "--json")) == {"0": data}
    assert "memory: device 1 -" in run("evict", "1-2", "1")
    assert run("migrate", "3", "1", "--modules", "ffn").startswith("migrated layer 3 of instance 0 to device 1 in ")
    run("migrate", "3", "0", "--modules", "ffn")
    assert run("scale-out", "1").startswith("replicated instance 0 on device 1, which is now an instance in ")
    assert set(json.loads(run("placement", "--json"))) == {"0", "1"}
    assert run("scale-in", "1").startswith("ended the instance on device 1")
    refused = CliRunner().invoke(app, ["evict", "1-2", "1", "--target", placed.target])
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: FAILED_PRECONDITION: ")
    beyond = CliRunner().invoke(app, ["replicate", "0-9", "1", "--target", placed.target])
    assert beyond.exit_code == 1
    assert beyond.stderr.startswith("error: INVALID_ARGUMENT: ")
    placed.check_idle()


def test_commands_send_the_admin_token(start: Callable[..., Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    live, file = start(api_token="sesame", admin_token="root"), tmp_path / "admin"
    file.write_text("root\n")
    command = ["placement", "--target", live.target]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: UNAUTHENTICATED")
    assert CliRunner().invoke(app, [*command, "--token-file", str(file)]).exit_code == 0
    monkeypatch.setenv("AMOEBA_ADMIN_TOKEN", "root")
    assert CliRunner().invoke(app, command).exit_code == 0


# The metrics


def test_changes_and_layers_are_counted(placed: Live):
    def lines() -> set[str]:
        return set(generate_latest(placed.server.metrics.registry).decode().splitlines())

    async def looked_again() -> None:
        before = placed.server.metrics.latest
        while placed.server.metrics.latest is before:
            await asyncio.sleep(0.01)

    def look_again() -> None:
        placed.loop.run(asyncio.wait_for(looked_again(), TIMEOUT_S))

    with Client(placed.target) as client:
        client.replicate(range(1, 3), 1)
        look_again()
        found = lines()
        for device, count in ((0, 4), (1, 2)):
            assert f'amoeba:layer_replicas{{device="{device}",instance="0"}} {count}.0' in found
        client.evict(range(1, 3), 1)
        code, _ = code_and_text(lambda: client.evict(range(1, 3), 1))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
    look_again()
    found = lines()
    assert not any(line.startswith('amoeba:layer_replicas{device="1"') for line in found)
    for kind, result in (("replicate", "done"), ("evict", "done"), ("evict", "refused")):
        assert f'amoeba:scaling_operations_total{{kind="{kind}",result="{result}"}} 1.0' in found
    assert 'amoeba:scaling_seconds_count{kind="replicate"} 1.0' in found
