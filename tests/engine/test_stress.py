"""Up to 2,000 requests of real lengths from several threads, with cancels, preemption and mixed settings."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from device_memory import live_bytes
from serving_checks import TIMEOUT_S, alone, check_idle
from tiny_models import tiny_config, write_model

from amoeba_jax import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.usefixtures("quick_steps")

NUM_CLIENTS = 6
BATCH = 16  # requests that a client runs at once
VOCABULARY = 211
PAGE_SIZE = 4
SETTINGS: dict[str, Any] = {
    "page_size": PAGE_SIZE,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "progress": False,
}


@dataclass(frozen=True)
class Case:
    """A request of the load. `cancel` says whether and when its client cancels it."""

    name: str
    prompt: list[int]
    params: SamplingParams
    cancel: str | None


@pytest.fixture(scope="module")
def lengths(shared_data: Path) -> list[tuple[int, int]]:
    """Prompt and output lengths of a production trace, scaled to a context of 64 tokens."""
    trace = np.load(shared_data / "traces" / "azure2023_conv.npz")
    prompts = np.clip(trace["input_tokens"] // 100, 1, 44)
    outputs = np.clip(trace["output_tokens"] // 45, 1, 13)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer. The tests stress the engine, not the model."""
    return write_model(tiny_config("llama2") | {"num_hidden_layers": 1}, tmp_path_factory.mktemp("models") / "one")


def make_cases(lengths: list[tuple[int, int]], count: int, penalties: bool) -> list[Case]:
    """Return requests with lengths of the trace. One in seven is cancelled. Prompts of a family share a prefix."""
    kinds = ["greedy", "seeded", "free", "several", "penalty" if penalties else "seeded"]
    random = np.random.default_rng(2)
    families = random.integers(0, VOCABULARY, (8, 44))
    cases = []
    for index, (prompt_length, output_length) in enumerate(lengths[:count]):
        prompt = random.integers(0, VOCABULARY, prompt_length)
        shared = int(random.integers(0, prompt_length + 1))
        prompt[:shared] = families[random.integers(8)][:shared]
        params = SamplingParams(
            temperature=0, max_tokens=output_length, ignore_eos=True, priority=int(random.integers(0, 3))
        )
        kind = random.choice(kinds, p=[0.4, 0.25, 0.15, 0.1, 0.1])
        if kind != "greedy":
            params = replace(params, temperature=0.9, seed=None if kind == "free" else index)
        if kind == "seeded":
            params = replace(params, top_p=0.9)
        if kind == "several":
            params = replace(params, n=2)
        if kind == "penalty":
            params = replace(params, frequency_penalty=0.5, logit_bias={7: 2.0})
        draw = random.random()
        cancel = "before" if draw < 0.03 else "midway" if draw < 0.07 else "any time" if draw < 0.15 else None
        cases.append(Case(f"case {index}", prompt.tolist(), params, cancel))
    return cases


def run_streamed(llm: LLM, case: Case) -> RequestOutput:
    """Stream a request. Cancel it before the engine has it, or after its first output."""
    stream = llm.stream(case.prompt, case.params, request_id=case.name)
    if case.cancel == "before":
        assert llm.cancel(case.name)
        *_, output = stream
        return output
    output = next(stream)
    if not output.finished:
        assert llm.cancel(case.name)
        *_, output = stream
    return output


def run_batch(llm: LLM, cases: list[Case]) -> list[RequestOutput]:
    """Run a batch. Another thread cancels some requests: before submission, in the queue, or while they run."""
    done = threading.Event()

    def cancel() -> None:
        for name in [case.name for case in cases if case.cancel == "any time"]:
            while not done.is_set() and not llm.cancel(name):
                done.wait(0.001)  # not known yet: try again

    thread = threading.Thread(target=cancel, daemon=True)
    thread.start()
    try:
        prompts, params = [case.prompt for case in cases], [case.params for case in cases]
        return llm.generate(prompts, params, request_ids=[case.name for case in cases])
    finally:
        done.set()
        thread.join(TIMEOUT_S)


def serve(llm: LLM, cases: list[Case]) -> dict[str, RequestOutput]:
    """Serve all cases through `NUM_CLIENTS` threads. Raise the error of a client, or fail if an answer is missing."""
    chunks: queue.SimpleQueue[list[Case]] = queue.SimpleQueue()
    for start in range(0, len(cases), BATCH):
        chunks.put(cases[start : start + BATCH])
    results: queue.SimpleQueue[RequestOutput | BaseException] = queue.SimpleQueue()

    def client() -> None:
        try:
            while True:
                chunk = chunks.get_nowait()
                streamed = [case for case in chunk if case.cancel in ("before", "midway")]
                for case in streamed:
                    results.put(run_streamed(llm, case))
                for output in run_batch(llm, [case for case in chunk if case not in streamed]):
                    results.put(output)
        except queue.Empty:
            pass
        except BaseException as error:
            results.put(error)

    for _ in range(NUM_CLIENTS):
        threading.Thread(target=client, daemon=True).start()
    outputs = {}
    for _ in cases:
        result = results.get(timeout=TIMEOUT_S)
        if isinstance(result, BaseException):
            raise result
        outputs[result.request_id] = result
    return outputs


def count_launching_threads(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Count the programs that each thread launches from now on, in all engines."""
    launches: dict[int, int] = {}
    launch: Callable = jax.stages.Compiled.__call__

    def counted(self: jax.stages.Compiled, *args: object, **kwargs: object) -> object:
        launches[threading.get_ident()] = launches.get(threading.get_ident(), 0) + 1
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", counted)
    return launches


def load(num_devices: int, tp: int, num_requests: int, slow: bool = False) -> Any:
    """Return a layout and its number of requests. An instance has pages for one sequence of the full context."""
    num_pages = SETTINGS["max_model_len"] // PAGE_SIZE // tp
    name = f"{num_requests} requests, {num_devices // tp} x TP{tp}"
    return pytest.param(num_devices, tp, num_pages, num_requests, id=name, marks=[pytest.mark.slow] * slow)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_devices", "tp", "num_pages", "num_requests"),
    [
        load(2, 1, 300),
        load(4, 2, 200, slow=True),
        load(4, 1, 2000, slow=True),
        load(4, 2, 2000, slow=True),
        load(8, 1, 2000, slow=True),
        load(8, 2, 2000, slow=True),
        load(8, 4, 2000, slow=True),
    ],
)
def test_load_with_cancels_and_preemption(
    directory: Path,
    lengths: list[tuple[int, int]],
    compile_cache: str,
    monkeypatch: pytest.MonkeyPatch,
    num_devices: int,
    tp: int,
    num_pages: int,
    num_requests: int,
):
    """At TP1, the pages hold about half of the sequences that have a slot."""
    # The sampler for penalties needs a third of all programs, so only one layout uses it.
    cases = make_cases(lengths, num_requests, penalties=tp == 4)
    before = live_bytes()
    launches = count_launching_threads(monkeypatch)
    settings: dict[str, Any] = {**SETTINGS, "compile_cache": compile_cache, "num_devices": num_devices}
    settings |= {"device_memory": "64MiB", "kv_cache_tokens": num_pages * SETTINGS["page_size"]}
    with LLM(directory, tensor_parallel_size=tp, **settings) as llm:
        llm.warmup()
        serve(llm, [replace(case, name=f"warm-up {case.name}", cancel=None) for case in cases[:64]])
        check_idle(llm)
        warm = live_bytes()
        outputs = serve(llm, cases)

        assert set(outputs) == {case.name for case in cases}
        for case in cases:
            check_answer(case, outputs[case.name])
        # Larger instances also have the pages of released weights. This load does not fill them.
        assert llm.stats.preemptions > 0 or tp > 1
        check_idle(llm)
        assert live_bytes() == warm
        (thread,) = launches
        assert thread == llm._dispatcher._thread.ident

        repeatable = [case for case in cases if case.cancel is None and case.params.seed is not None]
        greedy = [case for case in cases if case.cancel is None and case.params.temperature == 0]
        preempted = [case for case in repeatable + greedy if outputs[case.name].metrics.num_preemptions]
        assert len(preempted) >= 5 or tp > 1
        for case in [*repeatable[:: len(repeatable) // 10], *greedy[:: len(greedy) // 10], *preempted[:10]]:
            expected = [output.token_ids for output in alone(llm, case.prompt, case.params)]
            assert [output.token_ids for output in outputs[case.name].outputs] == expected, case
    assert live_bytes() == before


def check_answer(case: Case, output: RequestOutput) -> None:
    """Check that a request has all its tokens, or was cancelled and reports it."""
    assert output.error is None
    assert len(output.outputs) == case.params.n
    for completion in output.outputs:
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == case.params.max_tokens
        else:
            assert (completion.finish_reason, case.cancel is None) == ("abort", False), case
            assert len(completion.token_ids) < case.params.max_tokens
    if case.cancel == "before":
        assert all(completion.finish_reason == "abort" for completion in output.outputs)
