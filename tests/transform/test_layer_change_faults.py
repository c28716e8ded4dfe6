"""Changes of placements: failures part-way, random order, and no late compilation."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import engine_of, in_dispatcher
from serving_checks import check_idle
from test_layer_changes import NUM_LAYERS, ONE, check_bytes, engine
from tiny_models import tiny_config, write_model
from transform_cases import Background, decoding, requests, tokens, undisturbed, wait_until_decoding

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.errors import LayoutError, MemoryBudgetError, RequestError, TransformError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.runner import Runner
from amoeba_jax.instances.sequence import SequenceState
from amoeba_jax.transform.relocation import Relocation
from amoeba_jax.weights.store import WeightStore

pytestmark = pytest.mark.usefixtures("quick_steps")
ASKED = requests(3, max_tokens=80)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("qwen3") | {"num_hidden_layers": NUM_LAYERS}
    return write_model(config, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def first_only(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with engine(directory, compile_cache, placement=ONE) as llm:
        yield llm


@pytest.fixture(scope="module")
def replicas(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with engine(directory, compile_cache) as llm:
        yield llm


def back_to_one(llm: LLM) -> None:
    """Place all layers on device 0 again, after any failure."""
    placement = llm.placement()
    for device in (1, 2, 3):
        for layer in range(NUM_LAYERS):
            for name, homes in (("attention", placement.attention[layer]), ("ffn", placement.ffn[layer])):
                starts = {home.start for home in homes}
                if starts == {device}:
                    llm.migrate(range(layer, layer + 1), 0, modules=name)
                elif device in starts:
                    llm.evict(range(layer, layer + 1), device, modules=name)


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (WeightStore, "copy_modules", 2),
        (Cluster, "add_layer", 2),
        (Relocation, "_move", 1),
        pytest.param(Relocation, "_move", 4, marks=pytest.mark.slow),
        (Relocation, "settle", 1),
        (Relocation, "_install", 1),
        (Runner, "run", 3),
    ],
)
@pytest.mark.parametrize("kind", ["replicate", pytest.param("migrate", marks=pytest.mark.slow)])
def test_a_fault_on_the_way_loses_no_request(
    first_only: LLM, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, kind: str
):
    llm, calls, method = first_only, [0], getattr(owner, name)
    before = llm.memory()

    def failing(self: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise RuntimeError("the device has failed")
        return method(self, *args, **options)

    running, expected = decoding(llm, 3, ASKED)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        if owner is Runner:  # the change may have ended before the step fails
            with contextlib.suppress(TransformError):
                getattr(llm, kind)(range(1, 5), 1)
        else:
            with pytest.raises(RuntimeError, match="the device has failed"):
                getattr(llm, kind)(range(1, 5), 1)
    assert calls[0] >= call
    assert tokens(running.result()) == expected
    back_to_one(llm)
    assert tokens(llm.generate(*ASKED)) == expected
    check_idle(llm)
    assert llm.memory().by_owner(0) == before.by_owner(0)
    check_bytes()


def random_change(llm: LLM, random: np.random.Generator) -> None:
    """Make a random change, which may be refused with a clear error."""
    first = int(random.integers(NUM_LAYERS))
    layers = range(first, int(random.integers(first + 1, NUM_LAYERS + 1)))
    device, instance = int(random.integers(4)), int(random.integers(2))
    module = str(random.choice(["layer", "layer", "attention", "ffn", "kv"]))
    changes: list[Callable[[], object]] = [
        lambda: llm.replicate(layers, device, instance, "layer" if module == "kv" else module),
        lambda: llm.evict(layers, device, instance, "layer" if module == "kv" else module),
        lambda: llm.migrate(layers, device, instance, module),
        lambda: llm.migrate(layers, device, instance, move_kv=False),
        lambda: llm.transform(2, devices=[2, 3]),
        lambda: llm.transform(2, devices=[2, 3], running="pause", release_weights=False),
        lambda: llm.transform(1, devices=[2, 3]),
        lambda: llm.transform(2, devices=[0, 1]),
        lambda: llm.transform(1, devices=[0, 1]),
        lambda: llm.scale_in(device),
        lambda: llm.scale_out(device, instance),
    ]
    with contextlib.suppress(RequestError, LayoutError, MemoryBudgetError):
        changes[int(random.choice(len(changes), p=[0.2, 0.13, 0.17, 0.07, 0.07, 0.06, 0.07, 0.05, 0.05, 0.05, 0.08]))]()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_tokens_do_not_depend_on_changes_in_random_order(replicas: LLM, seed: int):
    llm, random = replicas, np.random.default_rng(seed)
    asked = requests(8, seed=3, max_tokens=80)
    expected = undisturbed(llm, asked)
    running = Background(llm, *asked)
    wait_until_decoding(llm, 4)
    for _ in range(24):
        random_change(llm, random)
    assert tokens(running.result()) == expected
    assert llm.stats.failed_steps == 0


@pytest.mark.slow
def test_replicas_with_layers_on_each_others_devices_do_not_block_each_other(directory: Path, compile_cache: str):
    with engine(directory, compile_cache, num_devices=2) as llm:
        asked = requests(4, max_tokens=80)
        expected = tokens(llm.generate(*asked))
        llm.migrate(range(3, 6), 1, instance=0)
        llm.migrate(range(0, 3), 0, instance=1)
        assert [str(llm.placement(n)) for n in (0, 1)] == ["0-2: TP1[0]   3-5: TP1[1]", "0-2: TP1[0]   3-5: TP1[1]"]
        end = llm.stats.steps + 10_000
        while llm.stats.steps < end:
            running = [Background(llm, *asked) for _ in range(2)]
            wait_until_decoding(llm, 5)  # an instance runs at most 4
            assert [tokens(each.result()) for each in running] == [expected] * 2
        assert llm.stats.failed_steps == 0
        llm.migrate(range(3, 6), 0, instance=0)
        llm.migrate(range(0, 3), 1, instance=1)
        check_idle(llm)


def test_an_offloaded_request_goes_on_without_being_computed_again(first_only: LLM):
    llm = first_only
    running, expected = decoding(llm, 3, ASKED)
    computed = llm.stats.prompt_tokens

    def offload() -> list[SequenceState]:
        engine, found = engine_of(llm), []
        for sequence in engine.sequences.running[:2]:
            engine.admission.offload(sequence)
            found.append(sequence.state)
        return found

    assert in_dispatcher(llm, offload) == [SequenceState.OFFLOADED] * 2
    assert tokens(running.result()) == expected
    assert llm.stats.prompt_tokens == computed
    check_idle(llm)


@pytest.mark.slow
def test_200_random_placements_compile_nothing_late(directory: Path, compile_cache: str):
    sizes = {"strict_compile": True, "prepare_placements": True, "max_tensor_parallel_size": 2}
    with engine(directory, compile_cache, num_devices=2, **sizes) as llm:
        llm.warmup([1, 2])
        random, prompt = np.random.default_rng(1), list(range(3, 30))
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        expected = tokens(llm.generate([prompt] * 3, greedy))
        for _ in range(200):
            random_change(llm, random)
            assert tokens(llm.generate([prompt] * 3, greedy)) == expected
        assert llm.stats.late_programs == 0
