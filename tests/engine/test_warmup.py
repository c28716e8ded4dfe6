"""After a warm-up nothing is compiled. A missing program is counted and named. Strict mode refuses it."""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_watch import CompileWatch
from harness import engine_of
from tiny_models import byte_token, tiny_config, write_byte_tokenizer, write_model
from transform_cases import Background, wait_until_decoding

from amoeba_jax import LLM, SamplingParams, StructuredOutput
from amoeba_jax.cpu_cache import ProgramStore
from amoeba_jax.engine import warmup
from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import EngineClosedError, MemoryBudgetError, NotCompiledError, RequestError
from amoeba_jax.instances.instance import Instance
from amoeba_jax.programs.background import BackgroundCompiler, compile_programs
from amoeba_jax.programs.compiling import compile_program
from amoeba_jax.programs.enumeration import enumerate_programs
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.program_specs import ProgramKey, ProgramSpec
from amoeba_jax.weights.store import WeightStore
from sharding.errors import LayoutError

pytestmark = pytest.mark.usefixtures("quick_compile")

SETTINGS: dict[str, Any] = {
    "num_devices": 2,
    "device_memory": "8MiB",
    "page_size": 4,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "progress": False,
}
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, with a token for each byte."""
    config = tiny_config("smollm2") | {"num_hidden_layers": 1, "vocab_size": 256}
    directory = write_model(config, tmp_path_factory.mktemp("models") / "one")
    write_byte_tokenizer(directory, None)
    return directory


def make(directory: Path, compile_cache: str, **changes: Any) -> LLM:
    return LLM(directory, compile_cache=compile_cache, **{**SETTINGS, **changes})


@pytest.fixture(scope="module")
def llm(directory: Path, compile_cache: str, quick_compile: None) -> Iterator[LLM]:
    with make(directory, compile_cache, strict_compile=True) as llm:
        assert llm.warmup([1, 2]) > 0
        yield llm


def random_requests(seed: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return requests of every kind that needs its own programs."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 256, random.integers(1, 40)).tolist() for _ in range(count)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "top_k": 5, "top_p": 0.9, "n": 2},
        {"temperature": 0, "repetition_penalty": 1.2, "min_tokens": 1},
        {"temperature": 0.7, "logprobs": 3},
        {"temperature": 0, "prompt_logprobs": 2, "max_tokens": 1},
        {"temperature": 1, "prompt_logprobs": 0, "frequency_penalty": 0.5, "bad_words": ["ab", "xyz"]},
        {"temperature": 1, "structured": StructuredOutput(regex="[a-z ]{40}")},
    ]
    chosen = [kinds[index] for index in random.permutation(np.arange(count) % len(kinds))]
    limits = random.integers(1, 12, count).tolist()
    return prompts, [SamplingParams(**{"max_tokens": m, "seed": i, "ignore_eos": True} | k)
                     for i, (k, m) in enumerate(zip(chosen, limits, strict=True))]  # fmt: skip


@pytest.mark.slow
def test_random_load_with_transformations_compiles_nothing(llm: LLM):
    """JAX itself counts the compilations, in all threads, inside and outside the programs of the engine."""
    with CompileWatch() as watch:
        for seed, degree in enumerate((2, 1)):
            prompts, params = random_requests(seed, 12)
            load = Background(llm, prompts, params)
            wait_until_decoding(llm, 1)
            report = llm.transform(degree)
            outputs = load.result()
            assert [output.error for output in outputs if output.error is not None] == []
            assert all(
                len(completion.token_ids) == setting.max_tokens
                for output, setting in zip(outputs, params, strict=True)
                for completion in output.outputs
            )
            assert sum(group.steps for group in report.groups) > 0 or seed, "the first runs steps between layouts"
    assert watch.programs == 0
    assert llm.stats.late_programs == 0


def test_transformation_without_programs_is_refused(llm: LLM):
    """Only the transformation is refused, also without requests. Otherwise all later requests would be refused."""
    with pytest.raises(NotCompiledError, match="strict_compile"):
        llm.transform(2, release_weights=False)
    assert [view.tensor_parallel_size for view in llm.instances] == [1, 1]
    assert llm.generate([5, 6, 7], LONG)[0].error is None


@pytest.mark.slow
def test_pausing_compiles_nothing_where_it_was_prepared(directory: Path, compile_cache: str):
    """Merges and splits that keep weights compile nothing either, also if requests are paused."""
    with make(directory, compile_cache, strict_compile=True, prepare_pausing=True) as llm:
        llm.warmup([1, 2])
        with CompileWatch() as watch:
            for seed, way in enumerate(("pause", "migrate")):
                prompts, params = random_requests(seed, 8)
                load = Background(llm, prompts, params)
                wait_until_decoding(llm, 1)
                llm.transform(2, release_weights=False, running=way)
                more = Background(llm, *random_requests(seed + 10, 8))
                wait_until_decoding(llm, 1)
                llm.transform(1, running="wait" if way == "pause" else way)
                assert all(output.error is None for output in (*load.result(), *more.result()))
        assert watch.programs == 0
        assert llm.stats.late_programs == 0


def test_second_warmup_finds_everything(llm: LLM):
    assert llm.warmup([1, 2]) == 0


def test_warmup_harms_no_weights(llm: LLM, directory: Path, compile_cache: str):
    """A warm-up runs programs that write the cache and the weights. It must not change any token."""
    prompt = [7, 1, 8, 2, 8]
    with make(directory, compile_cache) as other:
        for degree in (1, 2):
            for each in (llm, other):
                each.set_layout(degree)
            expected, got = (each.generate(prompt, LONG)[0].outputs[0].token_ids for each in (other, llm))
            assert got == expected
    llm.set_layout(1)


def test_warmup_drops_cached_pages_that_it_may_write_over(directory: Path, compile_cache: str):
    with make(directory, compile_cache, tensor_parallel_size=2) as llm:
        prompt = list(range(20))
        before = llm.generate(prompt, LONG)[0]
        llm.warmup()
        after = llm.generate(prompt, LONG)[0]
        assert after.num_cached_tokens == 0
        assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_registry_lists_every_program(llm: LLM):
    infos = llm.executables()
    engine = engine_of(llm)
    wanted = enumerate_programs(engine.cluster.plan, engine.cluster.executables, (1, 2))
    assert {info.name for info in infos} == {str(request) for request in wanted}
    for info in infos:
        assert info.compile_s > 0
        assert info.argument_bytes > 0
        assert info.tensor_parallel_size == len(info.devices)
    for executable in engine.cluster.executables:
        assert executable.info.aliased_bytes >= executable.spec.donated_bytes
    layers = [e for e in engine.cluster.executables if e.spec.plan is not None and e.spec.plan.layers]
    assert layers
    assert all(executable.spec.donated_bytes > 1 << 20 for executable in layers)
    assert max(info.temp_bytes for info in infos) <= sum(engine.cluster.ledgers[0].reserved.values())


def test_program_that_would_copy_is_an_error():
    """A donated argument of another shape than the result cannot be updated in place."""

    def compile() -> jax.stages.Compiled:
        jitted = jax.jit(lambda x: jnp.concatenate([x, x]), donate_argnums=0)
        return jitted.lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()

    request = ProgramSpec(ProgramKey("doubling", (0,), (8,)), compile, donated_bytes=32, on=tuple(jax.devices()[:1]))
    with pytest.raises(RuntimeError, match=r"doubling.*would copy.*0 of 32 bytes"):
        compile_program(request)


def test_error_of_one_program_ends_the_others():
    def fail() -> jax.stages.Compiled:
        raise ValueError("no such program")

    def compile() -> jax.stages.Compiled:
        return jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()

    device = tuple(jax.devices()[:1])
    requests = [ProgramSpec(ProgramKey("add", (0,), (i,)), compile, on=device) for i in range(3)]
    requests.append(ProgramSpec(ProgramKey("fail", (0,), ()), fail, on=device))
    threads = set(threading.enumerate())
    with pytest.raises(ValueError, match="no such program"):
        list(compile_programs(requests, 2))
    assert set(threading.enumerate()) <= threads


def test_strict_mode_refuses_one_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """The program of this request has a size that no warm-up compiled."""
    requests = engine_of(llm).cluster.executables.specs
    sample_full = requests.sample_full
    monkeypatch.setattr(requests, "sample_full", lambda *sizes: sample_full(*sizes[:-1], sizes[-1] + 1))
    params = SamplingParams(temperature=0, max_tokens=4, bad_words=["ab"], ignore_eos=True)
    load = Background(llm, [[5, 6, 7]], LONG)
    wait_until_decoding(llm, 1)
    with pytest.raises(NotCompiledError, match="sample_full"):
        llm.generate([1, 2, 3], params)
    (output,) = load.result()
    assert len(output.outputs[0].token_ids) == 40
    assert llm.stats.late_programs == 0


def test_one_program_draws_with_all_options_for_a_number_of_rows(llm: LLM):
    cluster = engine_of(llm).cluster
    keys = [request.key for request in enumerate_programs(cluster.plan, cluster.executables, (1, 2))]
    draws = [key for key in keys if isinstance(key, ProgramKey) and key.kind == "sample_full"]
    # One program for each group of devices and shape of logits, `[V, R]`.
    assert len({(key.devices, key.shape[0]) for key in draws}) == len(draws) > 2


def test_bad_words_of_many_requests_need_no_program_of_their_own(directory: Path, compile_cache: str):
    """Each request bans 24 letter pairs of its earlier text, so a step has 96 banned pairs."""
    letters = {byte_token(letter): letter for letter in ascii_lowercase}
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
    free = [
        SamplingParams(seed=i, max_tokens=40, allowed_token_ids=tuple(letters), ignore_eos=True)
        for i, _ in enumerate(prompts)
    ]
    with make(directory, compile_cache, num_devices=1, max_num_seqs=4, strict_compile=True) as llm:
        llm.warmup()

        def texts(params: list[SamplingParams]) -> list[str]:
            outputs = llm.generate(prompts, params)
            assert [output.error for output in outputs] == [None] * 4
            return ["".join(letters[token] for token in output.outputs[0].token_ids) for output in outputs]

        said = [list(dict.fromkeys(map("".join, pairwise(text))))[:24] for text in texts(free)]
        assert min(map(len, said)) == 24
        params = [replace(each, bad_words=words) for each, words in zip(free, said, strict=True)]
        for text, words in zip(texts(params), said, strict=True):
            assert len(text) == 40
            assert not [word for word in words if word in text]
        assert llm.stats.late_programs == 0


def test_strict_mode_refuses_a_transformation_alone(llm: LLM):
    """If requests run, a transformation that keeps weights needs steps over other extents."""
    before = {instance.devices for instance in llm.instances}
    load = Background(llm, [[1, 2]], LONG)
    wait_until_decoding(llm, 1)
    with pytest.raises(RequestError, match="was not compiled before"):
        llm.transform(2, release_weights=False)
    assert {instance.devices for instance in llm.instances} == before
    assert len(load.result()[0].outputs[0].token_ids) == 40


def test_strict_mode_loads_again_what_was_dropped_for_others(llm: LLM):
    def compile() -> jax.stages.Compiled:
        return jax.jit(lambda x: x + 2).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()

    device = tuple(jax.devices()[:1])
    there, other = (ProgramSpec(ProgramKey("add", (0,), (i,)), compile, on=device) for i in range(2))
    executables = Executables(llm.dims, strict=True)
    assert len(list(executables.prepare([there]))) == 1
    executables.complete = True
    executables._store = ProgramStore()
    assert executables.get(there)(jnp.ones(3)).tolist() == [3, 3, 3]
    assert executables.num_late == 1
    with pytest.raises(NotCompiledError):
        executables.get(other)


def test_late_programs_are_counted_and_named(directory: Path, compile_cache: str, caplog: pytest.LogCaptureFixture):
    with make(directory, compile_cache, num_devices=1) as llm:
        llm.warmup()
        with caplog.at_level(logging.WARNING, "amoeba_jax"):
            llm.logits([1, 2, 3], decode_from=2)
        assert llm.stats.late_programs == 1
        assert "TP1[0] head of 1 rows (all of 1 tokens)" in caplog.text


def test_warmup_of_temporaries_over_the_budget_is_refused(directory: Path, compile_cache: str):
    with make(directory, compile_cache, num_devices=1) as llm:
        cluster = engine_of(llm).cluster
        cluster.activation_bytes = 0
        cluster.ledgers[0].reserve("activations", 0)
        cluster.ledgers[0].add("something else", cluster.ledgers[0].free_bytes)
        with pytest.raises(MemoryBudgetError, match=r"needs .* of temporaries"):
            llm.warmup()


def test_running_requests_refuse_a_warmup(llm: LLM):
    load = Background(llm, [[5, 6, 7]], LONG)
    wait_until_decoding(llm, 1)
    with pytest.raises(RequestError, match="programs cannot be warmed up with 1 running"):
        llm.warmup()
    load.result()


def test_programs_are_compiled_while_weights_are_loaded(
    directory: Path, compile_cache: str, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []
    load = WeightStore.load

    def counted(self: WeightStore, *args: Any) -> None:
        (compiler,) = compilers
        asked.append(compiler.num_left)
        load(self, *args)

    compilers: list[BackgroundCompiler] = []
    make_compiler = BackgroundCompiler.__init__

    def noted(self: BackgroundCompiler, *args: Any) -> None:
        make_compiler(self, *args)
        compilers.append(self)

    monkeypatch.setattr(BackgroundCompiler, "__init__", noted)
    monkeypatch.setattr(WeightStore, "load", counted)
    with make(directory, compile_cache, warmup=[1]) as llm:
        assert asked == [len(llm.executables())]
        assert llm.warmup([1]) == 0
        assert llm.generate([5, 6, 7], LONG)[0].error is None
        assert llm.stats.late_programs == 0


def test_closing_waits_for_one_program_of_a_warmup(
    directory: Path, compile_cache: str, monkeypatch: pytest.MonkeyPatch
):
    begun, go_on, ran = threading.Event(), threading.Event(), []
    run_once = warmup.run_once

    def held(engine: Engine, instance: Instance, spec: ProgramSpec) -> None:
        ran.append(spec)
        begun.set()
        assert go_on.wait(60)
        run_once(engine, instance, spec)

    monkeypatch.setattr(warmup, "run_once", held)
    llm = make(directory, compile_cache, num_devices=1)
    with ThreadPoolExecutor(2) as threads:
        warming = threads.submit(llm.warmup)
        assert begun.wait(60)
        closing = threads.submit(llm.close)
        while not engine_of(llm).closing:
            time.sleep(0.001)
        assert not closing.done(), "the program is being run"
        go_on.set()
        closing.result(60)
        with pytest.raises(EngineClosedError, match="close"):
            warming.result(60)
    assert len(ran) == 1


def test_weights_that_cannot_be_loaded_end_the_compiling(
    directory: Path, compile_cache: str, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> None:
        raise OSError("no such weights")

    monkeypatch.setattr(WeightStore, "load", fail)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no such weights"):
        make(directory, compile_cache, warmup=[1])
    assert not [thread for thread in set(threading.enumerate()) - before if "background" in thread.name]


def test_warmup_of_a_degree_that_there_cannot_be_is_refused_at_once(directory: Path, compile_cache: str):
    with pytest.raises(LayoutError, match="4"):
        make(directory, compile_cache, warmup=[4])
