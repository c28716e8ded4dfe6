"""Many random transformations under load: no deadlock, no growth of memory, and the right tokens."""

import random as python_random
import threading
from collections import Counter
from pathlib import Path

import pytest
from device_memory import total_live_bytes
from serving_checks import TIMEOUT_S, check_idle
from tiny_models import tiny_model
from transform_cases import make, requests, tokens

from amoeba_jax import LLM
from amoeba_jax.errors import LayoutError, RequestError
from amoeba_jax.transform.report import TransformReport, TransformVariant

CLIENTS = 3
IN_PLACE = [TransformVariant.IN_PLACE, TransformVariant.IN_PLACE_OVERLAPPED]


class Load:
    """Clients that repeat the same requests and cancel some."""

    def __init__(self, llm: LLM, seed: int):
        self.llm = llm
        self.prompts, self.params = requests(16, max_tokens=24)
        self.expected = tokens(llm.generate(self.prompts, self.params))
        self.answered = self.cancelled = 0
        self.errors: list[BaseException] = []
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, args=(seed + i,)) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _client(self, seed: int) -> None:
        choose = python_random.Random(seed)
        round_number = 0
        try:
            while not self._ends.is_set():
                round_number += 1
                chosen = choose.sample(range(len(self.prompts)), 6)
                names = [f"{seed}-{round_number}-{index}" for index in chosen]
                victim = choose.choice(names)
                timer = threading.Timer(choose.random() * 0.2, self.llm.cancel, [victim])
                timer.start()
                prompts, params = [self.prompts[i] for i in chosen], [self.params[i] for i in chosen]
                outputs = self.llm.generate(prompts, params, request_ids=names)
                timer.cancel()
                for index, name, output in zip(chosen, names, outputs, strict=True):
                    self._check(self.expected[index], tokens([output])[0], name == victim)
        except BaseException as error:
            self.errors.append(error)

    def _check(self, expected: list[tuple[int, ...]], got: list[tuple[int, ...]], may_be_cancelled: bool) -> None:
        with self._lock:
            if got == expected:
                self.answered += 1
                return
            assert may_be_cancelled, (expected, got)
            assert all(e[: len(g)] == g for e, g in zip(expected, got, strict=True))
            self.cancelled += 1

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a request never ended"
        if self.errors:
            raise self.errors[0]


def transform_at_random(llm: LLM, count: int, seed: int) -> Counter[str]:
    """Run `count` transformations with an effect. Return the number of each kind, and of refusals."""
    choose, found = python_random.Random(seed), Counter[str]()
    num_devices = llm.config.num_devices
    while sum(n for kind, n in found.items() if kind != "refused") < count:
        size = choose.choice([size for size in (2, 4, 8) if size <= num_devices])
        first = choose.randrange(0, num_devices, size)
        degree = choose.choice([degree for degree in (1, 2, 4) if degree <= size])
        try:
            report: TransformReport = llm.transform(
                degree,
                devices=list(range(first, first + size)),
                variant=choose.choice(IN_PLACE),
                release_weights=choose.random() < 0.8,
                layers_per_step=choose.choice([1, 1, 2, 100]),
            )
        except (LayoutError, RequestError):
            found["refused"] += 1
            continue
        found.update(f"{group.from_degree} to {group.to_degree}" for group in report.groups)
    return found


@pytest.mark.parametrize(
    ("num_devices", "count"),
    [
        pytest.param(2, 12, marks=[pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]),
        pytest.param(8, 500, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
@pytest.mark.usefixtures("quick_compile")
def test_random_transformations_under_load(tmp_path: Path, compile_cache: str, num_devices: int, count: int):
    with make(tiny_model("llama2", tmp_path), compile_cache, num_devices=num_devices) as llm:
        load = Load(llm, 0)
        transform_at_random(llm, max(4, count // 10), seed=1)
        load.end()
        llm.transform(1)
        check_idle(llm)
        warm, ledgers = total_live_bytes(), [dict(ledger.entries) for ledger in llm._engine.cluster.ledgers]
        load = Load(llm, 100)
        kinds = transform_at_random(llm, count, seed=2)
        load.end()
        llm.transform(1)
        check_idle(llm)
        assert total_live_bytes() <= warm + (64 << 10)
        assert [dict(ledger.entries) for ledger in llm._engine.cluster.ledgers] == ledgers
        assert load.answered > count / 4
        assert {kind for kind in kinds if kind != "refused"} >= {"1 to 2", "2 to 1"}
        print(f"{kinds}, {load.answered} requests answered, {load.cancelled} cancelled")
