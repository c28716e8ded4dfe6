"""Requests, steps, cancels and transformations in any order: no page is lost, and tokens are right.

The machine drives the engine in the dispatcher thread, so that an example always runs the same way.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiny_models import tiny_model
from transform_cases import make

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.engine import Engine
from amoeba_jax.errors import LayoutError, RequestError
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.request import Request
from amoeba_jax.transform.options import RunningRequests, TransformOptions
from amoeba_jax.transform.report import TransformReport, TransformVariant
from kvcache.allocator import BuddyAllocator
from sharding.placement import Home

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("quick_compile")]

PAGES = 20
MAX_STEPS = 2000


def cases() -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of different lengths. Half of the prompts have a common prefix."""
    random = np.random.default_rng(0)
    shared = random.integers(3, 200, 9).tolist()
    found = []
    for index, (length, max_tokens) in enumerate([(3, 30), (25, 8), (14, 20), (40, 3), (1, 12), (7, 50)]):
        prompt = random.integers(3, 200, length).tolist()
        kinds = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "n": 2}, {"temperature": 0.7, "seed": index}]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kinds[index % 3])
        found.append((shared + prompt if index % 2 else prompt, params))
    return found


CASES = cases()


class Machine(RuleBasedStateMachine):
    """Random operations on `llm`. `expected[case]` has the tokens of a case that runs alone."""

    llm: LLM
    expected: list[list[tuple[int, ...]]]

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[int, Request, list[Sequence]]] = []
        self.cancelled: set[int] = set()
        self.transformations: list[Future[TransformReport]] = []

    @property
    def engine(self) -> Engine:
        return self.llm._engine

    @rule(case=st.integers(0, len(CASES) - 1))
    @precondition(lambda self: len(self.requests) < 12)
    def submit(self, case: int) -> None:
        prompt, params = CASES[case]
        request = self.llm._registry.make(prompt, params, lambda _: None, None, None)
        self.requests.append((case, request, request.sequences))
        self.engine.submit([request.sequences[0]])

    @rule(wait=st.booleans(), times=st.integers(1, 5))
    def step(self, wait: bool, times: int) -> None:
        for _ in range(times):
            self.engine.advance()
            if wait:
                self.engine.drain()
            else:
                self.engine.collect()

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def cancel(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.cancelled.add(index)
        self.engine.sequences.finish(self.requests[index][2], "abort")

    @rule(
        tp=st.sampled_from([1, 2, 4]),
        devices=st.sampled_from([(0, 1, 2, 3), (0, 1), (2, 3)]),
        variant=st.sampled_from(list(TransformVariant)),
        release=st.booleans(),
        layers=st.integers(1, 4),
        running=st.sampled_from(get_args(RunningRequests)),
    )
    def transform(
        self,
        tp: int,
        devices: tuple[int, ...],
        variant: TransformVariant,
        release: bool,
        layers: int,
        running: RunningRequests,
    ) -> None:
        options = TransformOptions(tp, devices, variant, release and running != "pause", layers, running)
        # The call is refused if it cuts instances, if devices are busy, or if the requests do not fit.
        with contextlib.suppress(LayoutError, RequestError):
            self.transformations.append(self.engine.transform(options))

    @invariant()
    def pages_are_accounted_for(self) -> None:
        """Check that the live blocks have one reference for each running sequence and prefix cache."""
        engine = self.engine
        for instance in engine.instances:
            present = [engine.cluster.factory.allocators[device] for device in instance.group.device_indices]
            views = {instance.group.home: present}
            if instance.transition is not None:
                transition, to_come = instance.transition, instance.transition.allocators
                low, high = (present, to_come) if transition.up else (to_come, present)
                tp = transition.programs.lower
                views = {instance.group.home: high} | {
                    site.group.home: low[index * tp : (index + 1) * tp] for index, site in enumerate(transition.members)
                }
                assert len(instance.lanes) == len(transition.members)
            paused = {member.group.home: [member.lane] for member in instance.paused}
            for home, allocators in views.items():
                lanes = {home: [lane for lane in instance.lanes if home in lane.ranks]}
                # The new layout still has pages that paused sequences have freed since.
                at_most = bool(instance.paused) and home != instance.group.home
                check_live(allocators, home, lanes | within(paused, home), at_most=at_most)
            for each in (instance, *instance.paused):
                slots = [sequence.slot for sequence in each.running]
                assert len(set(slots)) == len(slots)
                assert set(slots).isdisjoint(each._free_slots)
                if not instance.paused:
                    assert len(slots) + len(each._free_slots) == each.sampler.num_slots
            if instance.paused:
                first = instance.paused[0]
                assert {s.slot for s in first.running}.isdisjoint({s.slot for s in instance.running})

    @property
    def num_unfinished(self) -> int:
        return sum(not s.finished for _, _, sequences in self.requests for s in sequences)

    def resume(self) -> None:
        """Resume paused requests."""
        for instance in self.engine.instances:
            if instance.paused_sequences:
                options = TransformOptions(instance.paused[0].tp, instance.group.device_indices)
                self.transformations.append(self.engine.transform(options))
        self.engine.end_transformations()

    def teardown(self) -> None:
        for _ in range(MAX_STEPS):
            self.engine.advance()
            self.engine.drain()
            self.engine.changes.wait()
            if self.engine.num_paused == self.num_unfinished and not self.engine.changes.busy:
                break
            if self.engine.num_paused and not self.engine.changes.busy and not self.engine.advance():
                self.resume()  # waiting requests may need the paused requests to end
        else:
            raise AssertionError("the requests never ended")
        for future in self.transformations:
            future.result(0)
        self.resume()
        for _ in range(MAX_STEPS):
            self.engine.advance()
            self.engine.drain()
            if not self.engine.has_requests:
                break
        else:
            raise AssertionError("paused requests never ended")
        for index, (case, _, sequences) in enumerate(self.requests):
            outputs = [tuple(sequence.output) for sequence in sequences]
            if index in self.cancelled:
                for output, expected in zip(outputs, self.expected[case], strict=True):
                    assert expected[: len(output)] == output
            else:
                assert outputs == self.expected[case], f"case {case}"
        self.engine.set_layout(1)
        for instance in self.engine.instances:
            instance.lane.cache.clear()
        for allocator in self.engine.cluster.factory.allocators:
            assert allocator.free_units == allocator.total_units
        self.llm._registry.end([request for _, request, _ in self.requests])


def within(paused: dict[Home, list[Lane]], home: Home) -> dict[Home, list[Lane]]:
    """Return the paused lanes with pages on a home's devices."""
    return {other: lanes for other, lanes in paused.items() if set(other.devices) & set(home.devices)}


def check_live(
    allocators: list[BuddyAllocator], home: Home, lanes_at: dict[Home, list[Lane]], *, at_most: bool = False
) -> None:
    """Check that live blocks have exactly the references of sequences and caches, or at least these if `at_most`."""
    assert len(allocators) == home.degree
    for device, allocator in zip(home.devices, allocators, strict=True):
        used = Counter[int]()
        for at, lanes in lanes_at.items():
            if device not in at.devices:
                continue
            rank, units = device - at.devices[0], allocator.max_tp // at.degree
            for lane in lanes:
                tables = [s.pages.table for s in lane.running] + [lane.cache.table()]
                for table in tables:
                    used.update(unit * units for unit in table[lane.ranks[at]][rank].tolist())
        live = Counter({block[0]: allocator.references(block[0]) for block in allocator.live_blocks()})
        assert used <= live if at_most else used == live


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama2", tmp_path_factory.mktemp("models"))


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="no prefix cache", marks=pytest.mark.slow), pytest.param(True, id="prefix cache")],
)
def llm(request: pytest.FixtureRequest, directory: Path, compile_cache: str) -> Iterator[LLM]:
    """Provide an engine with pages for a few of the requests."""
    settings = {"kv_cache_tokens": 4 * PAGES, "device_memory": "8MiB", "max_num_seqs": 4, "max_model_len": 80}
    with make(directory, compile_cache, prefix_caching=request.param, **settings) as llm:
        yield llm


@pytest.mark.parametrize("examples", [4, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_any_order(llm: LLM, examples: int):
    class ThisMachine(Machine):
        pass

    ThisMachine.llm = llm
    ThisMachine.expected = [
        [tuple(output.token_ids) for output in llm.generate(prompt, params)[0].outputs] for prompt, params in CASES
    ]
    limits = settings(
        max_examples=examples,
        stateful_step_count=25,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    llm._dispatcher.call(lambda: run_state_machine_as_test(ThisMachine, settings=limits)).result()
