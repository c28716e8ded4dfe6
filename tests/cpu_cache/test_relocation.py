"""A program is compiled for one group of devices, cached once and loaded for the others, with equal results."""

import logging
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import jax
import pytest
from harness import engine_of, in_dispatcher
from jax import monitoring
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_config, write_model

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.cpu_cache import relocation
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.programs.compiling import Executable

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("quick_compile")]

SETTINGS: dict[str, Any] = {
    "num_devices": 4,
    "device_memory": "16MiB",
    "kv_cache_tokens": 512,
    "page_size": 4,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 128,
    "segment_layers": 1,
    "phase_pages": 16,
    "progress": False,
}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, seed=4, top_k=20, repetition_penalty=1.2, max_tokens=12, ignore_eos=True),
]
PROMPT = [5, 6, 7, 8, 9, 10]
compiled = Counter[str]()


def _count(event: str, _: float, **__: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compiled["by XLA"] += 1


monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny_config("llama2") | {"num_hidden_layers": 2}, tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache")
    path.chmod(0o700)
    return path


@pytest.fixture(autouse=True)
def own_programs() -> None:
    """Clear the programs of other tests. JAX would not compile them again."""
    jax.clear_caches()


def executables(llm: LLM) -> list[Executable]:
    return list(engine_of(llm).cluster.executables)


def everywhere(llm: LLM, params: SamplingParams) -> list[tuple[int, ...]]:
    """Return the tokens of a prompt on each instance. Each instance gets one request."""
    count = len(llm.instances)
    outputs = llm.generate([[*PROMPT] for _ in range(count)], params)
    return [output.outputs[0].token_ids for output in outputs]


def pointers(llm: LLM) -> list[list[int]]:
    """Return the addresses of the KV caches of all instances."""
    return [
        [shard.data.unsafe_buffer_pointer() for extent in i.site.extents() for shard in extent.addressable_shards]
        for i in engine_of(llm).instances
    ]


def test_all_devices_compute_the_same_in_place(directory: Path, cache: Path):
    """This includes groups of two devices, whose reductions and page exchanges must stay in the group."""
    tokens = defaultdict(set)
    with LLM(directory, compile_cache=str(cache), prefix_caching=False, **SETTINGS) as llm:
        for degree in (1, 2, 1):
            if degree != llm.instances[0].tensor_parallel_size:
                llm.transform(degree)
            before = pointers(llm)
            for index, params in enumerate(PARAMS):
                tokens[index].update(everywhere(llm, params))
            assert pointers(llm) == before, "every step updates the cache in place"
        assert all(len(found) == 1 for found in tokens.values())
        made = executables(llm)
        families = Counter(e.spec.family for e in made if not e.info.cached)
        assert not [family for family, count in families.items() if count > 1]
        assert sum(e.info.cached for e in made) > len(made) / 3
        for executable in made:
            assert executable.info.aliased_bytes >= executable.spec.donated_bytes
        check_idle(llm)


def test_the_cache_has_each_program_once_and_for_any_device(directory: Path, cache: Path):
    """Another process compiles nothing, on any device. The test clears JAX's programs to simulate the process."""
    entries = {path.name for path in cache.glob("amoeba_program-*-cache")}
    with LLM(directory, compile_cache=str(cache), prefix_caching=False, **SETTINGS) as llm:
        before = compiled["by XLA"]
        last = engine_of(llm).instances[-1]
        inputs = in_dispatcher(llm, last.runner.prepare, StepPlan(last.buckets.step(1), ()), last.lanes)
        assert inputs.work[0].programs
        assert compiled["by XLA"] == before, "the entry is that of the first device"
        everywhere(llm, PARAMS[0])
        llm.transform(2)
        everywhere(llm, PARAMS[0])
        assert compiled["by XLA"] == before
        made = executables(llm)
        assert all(e.info.cached for e in made)
        assert len({e.spec.family for e in made}) <= len(entries)
    assert {path.name for path in cache.glob("amoeba_program-*-cache")} == entries


@pytest.mark.slow
def test_a_damaged_entry_is_compiled_again(directory: Path, cache: Path, caplog: pytest.LogCaptureFixture):
    """Here the entry can be decompressed, but it is not a program."""
    with LLM(directory, compile_cache=str(cache), **SETTINGS) as llm:
        expected = everywhere(llm, PARAMS[0])
    jax.clear_caches()
    for path in cache.glob("amoeba_program-*-cache"):
        path.write_bytes(zlib.compress(b"nothing of use"))
    with caplog.at_level(logging.WARNING), LLM(directory, compile_cache=str(cache), **SETTINGS) as llm:
        assert everywhere(llm, PARAMS[0]) == expected
        assert not all(e.info.cached for e in executables(llm))
    assert "compiled again" in caplog.text


@pytest.mark.slow
def test_without_what_it_needs_of_jax_programs_are_compiled_for_each_group(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def missing(*_: Any) -> None:
        raise AttributeError("no such thing")

    tmp_path.chmod(0o700)
    monkeypatch.setattr(relocation._Pickler, "persistent_id", missing)
    relocation._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING), LLM(directory, compile_cache=str(tmp_path), **SETTINGS) as llm:
        found = everywhere(llm, PARAMS[0])
        assert len(set(found)) == 1
        assert not [e for e in executables(llm) if e.info.relocated]
    assert caplog.text.count("compiled for each group of devices") == 1
    relocation._warn_once.cache_clear()
