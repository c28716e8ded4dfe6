"""When steps are launched: the next one shortly before the end of the one that computes."""

import threading
from collections.abc import Iterator

import pytest
from harness import CALL_TIMEOUT_S, engine_of, in_dispatcher
from tiny_models import tiny_model

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.launching import LAUNCH_LEAD_S, SHORT_STEP_S, Launching
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.pace import ExpectedStep, Pace
from amoeba_jax.instances.step_plan import PendingStep

pytestmark = pytest.mark.usefixtures("quick_compile")

PROMPT = [5, 6, 7]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    directory = tiny_model("llama2", tmp_path_factory.mktemp("models"))
    settings = {"page_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 80}
    with LLM(directory, device_memory="4MiB", compile_cache=compile_cache, progress=False, **settings) as llm:
        llm.generate([PROMPT], GREEDY)
        yield llm


class Launches:
    """How many steps were pending when each step was launched, and when the second one was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.pending: list[int] = []
        self.second = threading.Event()
        launch = Launching.launch

        def noted(launching: Launching, instance: Instance) -> bool:
            pending = len(instance.pending)
            if launched := launch(launching, instance):
                self.pending.append(pending)
                if pending:
                    self.second.set()
            return launched

        monkeypatch.setattr(Launching, "launch", noted)


def expect(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have steps be expected to take that long."""
    monkeypatch.setattr(
        Pace, "expected", lambda pace, launched_at, *_, **__: ExpectedStep(launched_at, launched_at + seconds)
    )


def test_long_steps_are_not_launched_ahead_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """All end sooner than is expected here: each is launched when the one before has ended."""
    expected = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    expect(monkeypatch, 3600.0)
    launches = Launches(monkeypatch)
    assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == expected
    assert launches.pending == [0] * 12


@pytest.mark.parametrize("seconds", [LAUNCH_LEAD_S / 2, 0.9 * SHORT_STEP_S])
def test_short_steps_are_launched_ahead_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch, seconds: float):
    """Steps take a millisecond here: one that waited for its time would be launched behind the result."""
    expect(monkeypatch, seconds)
    launches = Launches(monkeypatch)
    llm.generate([PROMPT], GREEDY)
    assert launches.pending[:2] == [0, 1]


def test_a_step_is_launched_before_the_expected_end_of_the_one_that_computes(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Nothing else wakes the thread: no result is taken before that step is there."""
    expect(monkeypatch, LAUNCH_LEAD_S + 0.2)
    launches, done = Launches(monkeypatch), PendingStep.done.fget
    assert done is not None
    monkeypatch.setattr(PendingStep, "done", property(lambda step: launches.second.is_set() and done(step)))
    thread = threading.Thread(target=llm.generate, args=([PROMPT], GREEDY))
    thread.start()
    thread.join(CALL_TIMEOUT_S)
    assert not thread.is_alive()
    assert launches.pending[:2] == [0, 1]


def test_a_request_that_comes_meanwhile_is_in_the_next_step(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Prompts wait for the step in flight alone."""
    expect(monkeypatch, 3600.0)
    launches = Launches(monkeypatch)
    first = llm.stream(PROMPT, GREEDY)
    next(first)
    in_dispatcher(llm, lambda: None)
    assert len(llm.generate([[9, 8]], GREEDY)[0].outputs[0].token_ids) == 12
    assert sum(1 for _ in first) > 0
    assert set(launches.pending) == {0}
    assert engine_of(llm).stats.preemptions == 0


def test_a_call_that_comes_while_a_step_is_launched_is_served_before_the_next_is(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    """An urgent request must not wait until steps are launched on all other instances."""
    expect(monkeypatch, 0.9 * SHORT_STEP_S)
    events: list[str] = []
    launch = Launching.launch

    def noted(launching: Launching, instance: Instance) -> bool:
        if not (launched := launch(launching, instance)):
            return False
        events.append("step")
        if len(events) == 1:
            llm._dispatcher.call(events.append, "call")
        return launched

    monkeypatch.setattr(Launching, "launch", noted)
    assert len(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids) == 12
    assert events[:3] == ["step", "call", "step"]


def test_instances_take_turns_where_calls_come_all_the_time(
    tmp_path_factory: pytest.TempPathFactory, compile_cache: str, monkeypatch: pytest.MonkeyPatch
):
    """Steps take a millisecond here: the first instance always has another one to launch."""
    expect(monkeypatch, 0.9 * SHORT_STEP_S)
    turns: list[int] = []
    launch = Launching.launch

    def noted(launching: Launching, instance: Instance) -> bool:
        if launched := launch(launching, instance):
            turns.append(instance.id)
        return launched

    monkeypatch.setattr(Launching, "launch", noted)
    directory = tiny_model("llama2", tmp_path_factory.mktemp("models"))
    settings = {"page_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 80}
    with LLM(
        directory, num_devices=2, device_memory="4MiB", compile_cache=compile_cache, progress=False, **settings
    ) as llm:
        llm.generate([PROMPT, PROMPT], GREEDY)
        turns.clear()
        engine_of(llm).rounds.calls_wait = lambda: True
        llm.generate([PROMPT, PROMPT], GREEDY)
    ahead = [turns[:end].count(0) - turns[:end].count(1) for end in range(len(turns) - 4)]
    assert max(map(abs, ahead)) <= 6, turns
