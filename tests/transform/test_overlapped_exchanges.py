"""Layers that switch inside a step: programs that compute other layers move their pages.

CPU devices do not overlap computation and exchange. The tests check that pages end up in the right places.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from harness import engine_of, in_dispatcher, ledger_entries
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_config, write_model
from transform_cases import SHARED, Background, decoding, make, requests, tokens, transition_of, wait_until_decoding

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import RequestError, TransformError
from amoeba_jax.instances.runner import Runner
from amoeba_jax.instances.step import StepNotLaunchedError
from amoeba_jax.programs.batch import BatchShape, StepBatch
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.transform.relayout import SwitchInStep
from kvcache.exchange import ExchangeKind
from kvcache.migration import PADDING, phase_shape

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda count: f"{count}-devices"
)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """Provide an engine whose devices can form one instance, with segments of 1, 1 and 1 or 2, 2 and 1 layers."""
    depth, most = (3, 1) if request.param == 2 else (5, 2)
    config = {**tiny_config("llama2"), "num_hidden_layers": depth}
    directory = write_model(config, tmp_path_factory.mktemp("models") / "deep")
    settings = {**SHARED, "device_memory": "16MiB", "segment_layers": most, "phase_pages": 2, "overlap_exchange": True}
    settings["num_devices"] = request.param
    with make(directory, compile_cache, **settings) as llm:
        yield llm


@pytest.fixture
def idle(llm: LLM) -> Iterator[LLM]:
    """Provide the engine as TP1 instances without requests. Check afterwards that no page or byte is lost."""
    before = ledger_entries(llm)
    yield llm
    if any(view.tensor_parallel_size > 1 for view in llm.instances):
        llm.transform(1)
    check_idle(llm)
    assert ledger_entries(llm) == before
    assert all(instance.runner.switch is None for instance in engine_of(llm).instances)


def top(llm: LLM) -> int:
    return llm.config.num_devices


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record each switch that begins: first layer of its segment, and number of step programs that include it."""
    found: list[tuple[int, int]] = []
    begin = SwitchInStep.begin

    def wrapped(self: SwitchInStep, shape: BatchShape | None) -> Mapping[Any, Any]:
        parts = begin(self, shape)
        found.append((self.segment.layers.start, len(parts)))
        return parts

    monkeypatch.setattr(SwitchInStep, "begin", wrapped)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers_per_step", [1, pytest.param(4, marks=pytest.mark.slow), pytest.param("auto", marks=pytest.mark.slow)]
)
def test_tokens_and_pages_are_those_of_an_undisturbed_run(
    idle: LLM, begun: list[tuple[int, int]], layers_per_step: Any
):
    running, expected = decoding(idle, 8, requests(8, max_tokens=90))
    merge = idle.transform(top(idle), layers_per_step=layers_per_step)
    split = idle.transform(1, layers_per_step=layers_per_step)
    assert tokens(running.result()) == expected
    depth = idle.dims.config.num_layers
    assert [len(group.layers) for report in (merge, split) for group in report.groups] == [depth, depth]
    if layers_per_step == 1:
        # No other layer is at the higher degree in the first switch of a merge and in the last switch of a split.
        first, second, third = (segment.layers.start for segment in engine_of(idle).cluster.plan.segments)
        assert [start for start, _ in begun] == [second, first, third, second]
        assert all(parts for _, parts in begun)


@pytest.mark.parametrize(("distance", "num_layers"), [(None, 2), (1, 1), (1, 2), (3, 2)])
def test_a_program_does_what_two_do(idle: LLM, distance: int | None, num_layers: int):
    """The bytes are the same as after a step and a separate exchange."""
    if distance is not None and distance >= top(idle):
        pytest.skip("no two of these ranks are that far apart")
    idle.transform(top(idle))
    in_dispatcher(idle, _compare, engine_of(idle), distance, num_layers)


def _compare(engine: Engine, distance: int | None, num_layers: int) -> None:
    plan, executables, (instance,) = engine.cluster.plan, engine.cluster.executables, engine.instances
    group, dice = instance.group, np.random.default_rng(num_layers)
    programs = TransitionPrograms(plan, executables, group, 1, up=True, released=(1, group.tp), rows=2)
    segment, shape = plan.segments[0], programs.shape
    kind = ExchangeKind(distance, 1)
    ids = np.zeros((group.tp, 1, *phase_shape(group.tp, programs.phase_pieces, distance)), np.int32)
    own = np.prod(ids.shape[2:])
    pieces = group.tp * (sum(programs.high_extents) if distance is None else programs.high_extents[0])
    send, receive = ids.copy(), ids.copy()
    for rank in range(group.tp):
        send[rank] = dice.integers(-1, group.tp * programs.high_extents[0], ids.shape[1:])
        receive[rank] = dice.permutation(pieces)[:own].reshape(ids.shape[1:])
    receive.flat[::5] = PADDING
    send, receive = (jax.device_put(array, group.sharded) for array in (send, receive))

    def extents(seed: int, count: int) -> list[list[jax.Array]]:
        values, shapes = np.random.default_rng(seed), [extent.shape for extent in instance.site.kv[0]]
        return [[jax.device_put(values.random(it, np.float32), group.sharded) for it in shapes] for _ in range(count)]

    def step(program: jax.stages.Compiled, *exchange: Any) -> tuple[Any, ...]:
        states = jax.device_put(
            np.full((plan.dims.config.hidden_size, plan.hidden_tokens), 0.5, np.float32), group.replicated
        )
        packed = jax.device_put(batch.packed, group.sharded)
        begins = jax.device_put(np.array(True), group.replicated)
        weights = instance.site.weights(segment)
        return program(
            weights, extents(1, len(segment.layers)), states, packed, instance.runner.last_tokens, begins, *exchange
        )

    batch = StepBatch(shape, group.tp)
    batch.packed[:] = dice.integers(0, 2, batch.packed.shape)
    alone = step(executables.get(plan.layers_spec(executables.specs, group, segment, shape, programs.high_extents)))
    moved = extents(2, num_layers)
    exchange = executables.get(programs._exchange_spec(kind))
    moved = [exchange(layer, send, receive) for layer in moved]
    both = step(
        executables.get(programs._step_with_exchange(segment, shape, num_layers, distance)),
        extents(2, num_layers), send, receive,
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, list(both), [*alone, moved])
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(moved[0], extents(2, 1)[0], strict=True))


@pytest.mark.slow
def test_prompts_that_come_meanwhile(idle: LLM, begun: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch):
    """A step with a prompt covers one lane, so layers switch before it."""
    running, expected = decoding(idle, 4, requests(4, max_tokens=90))
    late: list[Background] = []
    run = Runner.run

    def wrapped(runner: Runner, *arguments: Any) -> Any:
        if transition_of(idle, runner) is not None and len(late) < 3:
            late.append(Background(idle, [list(range(3, 40))], [SamplingParams(temperature=0, max_tokens=8)]))
        return run(runner, *arguments)

    monkeypatch.setattr(Runner, "run", wrapped)
    idle.transform(top(idle), layers_per_step=1)
    idle.transform(1, layers_per_step=1)
    assert tokens(running.result()) == expected
    assert len({repr(tokens(prompt.result())) for prompt in late}) == 1
    assert begun


@pytest.mark.parametrize("up", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["merge", "split"])
def test_a_step_that_cannot_be_launched(
    idle: LLM, begun: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, up: bool
):
    """One request is refused. The layers switch without the step."""
    prompts, params = requests(6, max_tokens=60)
    expected = tokens(idle.generate(prompts, params))
    if not up:
        idle.transform(top(idle))
    running = [Background(idle, [prompt], [each]) for prompt, each in zip(prompts, params, strict=True)]
    wait_until_decoding(idle, 6)
    launch = Runner.launch
    refused: list[str] = []

    def fails(runner: Runner, *arguments: Any) -> Any:
        if runner.switch is not None and not refused:
            refused.append("once")
            raise StepNotLaunchedError("injected") from RequestError("injected")
        return launch(runner, *arguments)

    monkeypatch.setattr(Runner, "launch", fails)
    idle.transform(top(idle) if up else 1, layers_per_step=1)
    assert refused
    assert begun[0][1] == 0, "it ran alone"
    errors = 0
    for each, right in zip(running, expected, strict=True):
        try:
            assert tokens(each.result()) == [right]
        except RequestError:
            errors += 1
    assert errors == 1


@pytest.mark.first_by_default
@pytest.mark.parametrize(
    ("where", "up"),
    [
        pytest.param("begin", True, id="begin-merge"),
        pytest.param("begin", False, id="begin-split", marks=pytest.mark.slow),
        pytest.param("program", True, id="program-merge", marks=pytest.mark.slow),
        pytest.param("program", False, id="program-split"),
        pytest.param("end", True, id="end-merge"),
        pytest.param("end", False, id="end-split", marks=pytest.mark.slow),
    ],
)
def test_failures(idle: LLM, monkeypatch: pytest.MonkeyPatch, up: bool, where: str):
    """The group ends at the higher degree and recomputes its requests."""
    running, expected = decoding(idle, 6, requests(6, max_tokens=60), tp=1 if up else top(idle))
    failures = [RuntimeError("injected")]

    def fails(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        raise AssertionError("it is called once")

    with monkeypatch.context() as patch:
        if where == "program":
            method = TransitionPrograms.step_with_exchange

            def failing(self: TransitionPrograms, *arguments: Any) -> Any:
                program = method(self, *arguments)
                return fails if failures and program is not None else program

            patch.setattr(TransitionPrograms, "step_with_exchange", failing)
        else:
            method = getattr(SwitchInStep, where)
            patch.setattr(SwitchInStep, where, lambda *arguments: fails() if failures else method(*arguments))
        with pytest.raises(TransformError, match="injected"):
            idle.transform(top(idle) if up else 1, layers_per_step=1)
    assert {view.tensor_parallel_size for view in idle.instances} == {top(idle)}
    assert tokens(running.result()) == expected
    assert any(output.metrics.num_preemptions for output in running.outputs)
    idle.transform(1)
    assert tokens(idle.generate(*running.asked)) == expected


def test_without_programs_layers_switch_alone(idle: LLM, begun: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TransitionPrograms, "step_with_exchange", lambda *arguments: None)
    running, expected = decoding(idle, 6, requests(6, max_tokens=60))
    idle.transform(top(idle), layers_per_step=1)
    idle.transform(1, layers_per_step=1)
    assert tokens(running.result()) == expected
    assert not begun


@pytest.mark.slow
def test_warm_ups_have_the_programs(tmp_path: Path, compile_cache: str, begun: list[tuple[int, int]]):
    """The warm-up runs each program once. Nothing is compiled afterwards."""
    directory = write_model({**tiny_config("llama2"), "num_hidden_layers": 3}, tmp_path / "model")
    settings = {"num_devices": 2, "max_num_seqs": 2, "segment_layers": 2, "strict_compile": True}
    with make(directory, compile_cache, **settings, overlap_exchange=True, kv_cache_tokens=256) as llm:
        llm.warmup([1, 2])
        made = engine_of(llm).cluster.executables.num_made
        running, expected = decoding(llm, 4, requests(4, max_tokens=60))
        llm.transform(2, layers_per_step=1)
        llm.transform(1, layers_per_step=1)
        assert tokens(running.result()) == expected
        assert engine_of(llm).cluster.executables.num_made == made
    assert [start for start, parts in begun if parts] == [0, 2]
