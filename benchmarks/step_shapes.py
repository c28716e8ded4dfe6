"""Cost and benefit of groups of step shapes (buckets), such as chunks of 128 tokens.

    python benchmarks/step_shapes.py [--model DIRECTORY] [--repeats 9] [--json step_shapes.json]

The cost of a group is its number of programs and of their memory mappings, for four devices, all degrees and default
settings. For the benefit, the same work is timed with and without the shapes of the group, on one TP1 instance.
"""

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import jax
import numpy as np
from decode import launch
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM
from amoeba_jax.instances.instance import Instance
from amoeba_jax.programs.batch import BatchShape, StepBatch
from amoeba_jax.programs.enumeration import enumerate_programs
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.step_program import StepKey

_CONTEXT = 128
Steps = list[tuple[int, int, int]]
"""Steps of a case: decoded rows, prompts and chunk size of each."""


@dataclass(frozen=True)
class Case:
    """Group of step shapes (buckets), such as chunks of 128 tokens, and steps that show the value of the group.

    Attributes:
        steps: steps that do some work with shapes of the group.
        instead: steps that do the same work with other shapes.
        kept: function that returns whether a shape of any degree belongs to the group.
    """

    name: str
    steps: Steps
    instead: Steps
    kept: Callable[[BatchShape], bool]


@dataclass
class Result:
    """Result of a case.

    Attributes:
        programs: number of programs for the step shapes of the case, over all groups of devices.
        mappings: estimated number of memory mappings of these programs.
        with_s: median seconds of `Case.steps`.
        without_s: median seconds of `Case.instead`.
    """

    name: str
    programs: int
    mappings: int
    with_s: float
    without_s: float


def cases(rows: int) -> list[Case]:
    """Return a case for each group of step shapes of an instance with at most `rows` sequences.

    The instance must have the default token budget of a step, 512.
    """
    few = rows // 4

    def decodes(*sizes: int) -> Callable[[BatchShape], bool]:
        return lambda shape: shape.num_tokens == shape.num_rows and shape.num_rows in sizes

    def prompts(count: int, chunk: int) -> Callable[[BatchShape], bool]:
        return lambda shape: shape.groups[-1] == (count, chunk)

    def few_rows(shape: BatchShape) -> bool:
        return shape.num_tokens > shape.num_rows and shape.num_rows == few

    halves = [
        Case(f"decodes of {size}", [(size, 0, 0)], [(2 * size, 0, 0)], decodes(size))
        for size in (1 << power for power in range(rows.bit_length() - 1))
    ]
    return [
        *halves,
        Case("chunk of 128", [(few - 1, 1, 128)], [(few - 1, 1, 512)], prompts(1, 128)),
        Case("chunk of 32", [(few - 1, 1, 32)], [(few - 1, 1, 128)], prompts(1, 32)),
        Case("4 prompts of 128", [(few - 4, 4, 128)], [(few - 1, 1, 128)] * 4, prompts(4, 128)),
        Case("4 prompts of 32", [(few - 4, 4, 32)], [(few - 1, 1, 32)] * 4, prompts(4, 32)),
        Case(f"{few} rows beside 32 tokens", [(few - 1, 1, 32)], [(rows - 1, 1, 32)], few_rows),
        Case(f"{few} rows beside 128 tokens", [(few - 1, 1, 128)], [(rows - 1, 1, 128)], few_rows),
    ]


class Runner:
    """Runner of prepared steps on the first instance of an engine."""

    def __init__(self, llm: LLM):
        self.instance: Instance = llm._engine.instances[0]
        self.mappings: dict[BatchShape, int] = {}
        self._geometry = llm._engine.dims.pages
        rows = self.instance.buckets.max_num_seqs
        self._tables = [self.instance.lane.pages.allocate(self._geometry.pages_for(_CONTEXT)) for _ in range(rows)]
        self._batches: dict[tuple[int, int, int], StepBatch] = {}

    def prepare(self, step: tuple[int, int, int]) -> None:
        """Compile the programs of a step, and count their memory mappings. `step`: (decoding rows, prompts, chunk
        size)."""
        decodes, prompts, chunk = step
        shape = self.instance.buckets.step(*step)
        batch = StepBatch(shape, 1)
        first_prompt = shape.num_rows - prompts
        padding = first_prompt - decodes
        positions = [_CONTEXT - 1] * decodes + [-1] * padding + list(range(chunk)) * prompts
        batch.set("positions", np.asarray(positions))
        batch.set("last_token", np.cumsum([1] * first_prompt + [chunk] * prompts) - 1)
        num_pages = np.zeros(shape.num_rows, np.int32)
        for index, row in enumerate((*range(decodes), *range(first_prompt, shape.num_rows))):
            # If a chunk is longer than the context, its pages repeat.
            length = _CONTEXT if row < decodes else chunk
            num_pages[row] = self._geometry.pages_for(length)
            batch.set_table(row, np.resize(self._tables[index], (1, num_pages[row])))
        batch.set("num_pages", num_pages)
        self._batches[step] = batch
        if shape not in self.mappings:
            before = _num_mappings()
            self.run([step])
            self.mappings[shape] = _num_mappings() - before

    def run(self, steps: Steps) -> None:
        """Run steps one after the other, and wait for the last."""
        tokens = None
        for step in steps:
            tokens = launch(self.instance, self._batches[step]).argmax_ids
        np.asarray(tokens)


def _num_mappings() -> int:
    with open("/proc/self/maps", "rb") as maps:
        return sum(1 for _ in maps)


def _keys(llm: LLM) -> list[StepKey]:
    plan = llm._engine.cluster.plan
    requests = enumerate_programs(plan, Executables(plan.dims), plan.sub_meshes.degrees())
    return [request.key for request in requests if isinstance(request.key, StepKey)]


def measure(llm: LLM, repeats: int) -> list[Result]:
    """Time all cases with and without their step shapes, in turn."""
    runner, keys = Runner(llm), _keys(llm)
    results = []
    for case in cases(runner.instance.buckets.max_num_seqs):
        for step in {*case.steps, *case.instead}:
            runner.prepare(step)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats):
            for steps, taken in zip((case.steps, case.instead), times, strict=True):
                start = perf_counter()
                runner.run(steps)
                taken.append(perf_counter() - start)
        programs = sum(case.kept(key.batch) for key in keys)
        kinds = len({segment.kinds for segment in llm._engine.cluster.plan.segments})
        mappings = round(programs * runner.mappings[runner.instance.buckets.step(*case.steps[0])] / kinds)
        results.append(Result(case.name, programs, mappings, *map(median, times)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="../shared/data/models/SmolLM2-135M-Instruct")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with LLM(
        options.model,
        num_devices=4,
        device_memory="2GiB",
        load_format="random",
        compile_beside=False,
        compile_cache="",
        progress=False,
    ) as llm:
        results = measure(llm, options.repeats)
    table = Table(title="step shapes: the same work with them and without")
    for column in ("shapes", "programs", "mappings", "ms with", "ms without", "times as long without"):
        table.add_column(column, justify="right" if table.columns else "left")
    for r in results:
        times = f"{1e3 * r.with_s:.1f}", f"{1e3 * r.without_s:.1f}", f"{r.without_s / r.with_s:.2f}x"
        table.add_row(r.name, str(r.programs), str(r.mappings), *times)
    print(f"{platform.machine()} {jax.devices()[0].device_kind}, JAX {jax.__version__}, context {_CONTEXT}")
    Console(width=110).print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
