"""Launch order: a step is launched while the previous step computes, and calls are served between launches."""

import threading
from collections.abc import Iterator

import pytest
from harness import CALL_TIMEOUT_S, engine_of, in_dispatcher, registry_of
from tiny_models import tiny_model

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.steps import MAX_PENDING_STEPS, Steps
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.step import PendingStep

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
    """Records the number of pending steps at each launch. `second` is set by a launch behind a pending step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.pending: list[int] = []
        self.second = threading.Event()
        launch = Steps.launch

        def noted(steps: Steps, instance: Instance) -> bool:
            pending = len(instance.pending)
            if launched := launch(steps, instance):
                self.pending.append(pending)
                if pending:
                    self.second.set()
            return launched

        monkeypatch.setattr(Steps, "launch", noted)


def test_a_step_is_launched_while_the_one_before_computes(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """No result is taken before the second step is launched."""
    launches, done = Launches(monkeypatch), PendingStep.done.fget
    assert done is not None
    monkeypatch.setattr(PendingStep, "done", property(lambda step: launches.second.is_set() and done(step)))
    thread = threading.Thread(target=llm.generate, args=([PROMPT], GREEDY))
    thread.start()
    thread.join(CALL_TIMEOUT_S)
    assert not thread.is_alive()
    assert launches.pending[:2] == [0, 1]
    assert max(launches.pending) < MAX_PENDING_STEPS


def test_a_call_that_comes_while_a_step_is_launched_is_served_before_the_next_is(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    """An urgent request must not wait until every instance has launched as many steps as it may."""
    events: list[str] = []
    launch = Steps.launch

    def noted(steps: Steps, instance: Instance) -> bool:
        if not (launched := launch(steps, instance)):
            return False
        events.append("step")
        if len(events) == 1:
            llm._dispatcher.call(events.append, "call")
        return launched

    monkeypatch.setattr(Steps, "launch", noted)
    assert len(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids) == 12
    assert events[:3] == ["step", "call", "step"]


def test_instances_take_turns(
    tmp_path_factory: pytest.TempPathFactory, compile_cache: str, monkeypatch: pytest.MonkeyPatch
):
    """Each instance launches one step before any instance launches a second. Calls are served in between."""
    turns: list[int] = []
    launch = Steps.launch

    def noted(steps: Steps, instance: Instance) -> bool:
        if launched := launch(steps, instance):
            turns.append(instance.id)
        return launched

    def drive() -> list[bool]:
        engine = engine_of(llm)
        engine.submit([sequence for request in requests for sequence in request.sequences])
        launched = [engine.advance() for _ in range(MAX_PENDING_STEPS + 1)]
        while engine.has_requests:
            engine.drain()
            engine.advance()
        return launched

    monkeypatch.setattr(Steps, "launch", noted)
    directory = tiny_model("llama2", tmp_path_factory.mktemp("models"))
    settings = {"page_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 80}
    with LLM(
        directory, num_devices=2, device_memory="4MiB", compile_cache=compile_cache, progress=False, **settings
    ) as llm:
        llm.generate([PROMPT, PROMPT], GREEDY)
        turns.clear()
        requests = [registry_of(llm).make(PROMPT, GREEDY, lambda _: None, None, None) for _ in range(2)]
        assert in_dispatcher(llm, drive) == [True] * MAX_PENDING_STEPS + [False], "no more may be in flight"
        registry_of(llm).end(requests)
    assert turns[:4] == [0, 1, 0, 1]
