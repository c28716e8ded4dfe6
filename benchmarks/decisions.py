"""Time of a scheduler's decision (`Scheduler.tick`) in the dispatcher thread, by number of waiting requests.

    python benchmarks/decisions.py [--waiting 16 128 1024] [--running 32] [--repeats 101] [--json decisions.json]

Four TP1 instances run the maximum number of requests, so that a tick dispatches nothing. The table has the time of a
tick and of its two parts. In "snapshot", the scheduler takes a snapshot of the engine. In "decide", the policy reads
the whole queue. In the last column, "decide" is timed with a queue in which one in 20 requests is too long for one
device.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from machine import seconds
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.engine import Engine
from amoeba_jax.instances.sequence import Sequence
from serving.runtime.jax_executor import JaxExecutor
from serving.scheduler import POLICY_NAMES, ClusterView, Scheduler, make_policy

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
NUM_INSTANCES, PROMPT, NEW_TOKENS, LONG_EVERY = 4, 128, 128, 20


@dataclass(frozen=True)
class Decision:
    """Median seconds of a tick and of its two parts. `decide_long_s` is `decide_s` with long requests in the queue."""

    policy: str
    waiting: int
    tick_s: float
    snapshot_s: float
    decide_s: float
    decide_long_s: float


def sequences(llm: LLM, count: int) -> list[Sequence]:
    """Make `count` requests without submitting them to the engine, and return their sequences."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    made = [llm._registry.make([1 + i % 200] * PROMPT, params, lambda delivery: None, None, None) for i in range(count)]
    return [request.sequences[0] for request in made]


def with_long(view: ClusterView) -> ClusterView:
    """Return a copy of a snapshot in which one in 20 waiting requests is too long for one device."""
    size = view.limits[2].capacity_tokens
    queue = tuple(
        replace(request, max_total_tokens=size) if index % LONG_EVERY == 0 else request
        for index, request in enumerate(view.queue)
    )
    return replace(view, queue=queue)


def measure(engine: Engine, name: str, running: list[Sequence], waiting: list[Sequence], repeats: int) -> Decision:
    """Time the decisions of a policy. Call this function in the dispatcher thread."""
    executor = JaxExecutor(engine, 1, lambda action, future: None)
    scheduler = Scheduler(make_policy(name), executor)
    engine.submit(running)
    while scheduler.tick():
        pass
    engine.submit(waiting)
    assert scheduler.tick() == [], "there is room for none of them"
    assert len(engine.waiting) == len(waiting), "all others run"
    view = executor.snapshot()
    long_view = with_long(view)
    decision = Decision(
        name,
        len(waiting),
        tick_s=seconds(scheduler.tick, repeats),
        snapshot_s=seconds(executor.snapshot, repeats),
        decide_s=seconds(lambda: scheduler.policy.decide(view), repeats),
        decide_long_s=seconds(lambda: scheduler.policy.decide(long_view), repeats),
    )
    engine.sequences.finish([*running, *waiting], "abort")
    return decision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--running", type=int, default=32, help="running requests of each instance")
    nothing_changes = [name for name in POLICY_NAMES if name != "amoeba_paper"]  # It merges for these loads.
    parser.add_argument("--policies", nargs="+", default=nothing_changes)
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which all cases run in turn")
    parser.add_argument("--repeats", type=int, default=101, help="repeats of each measurement in a round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [(waiting, name) for waiting in options.waiting for name in options.policies]
    found: dict[tuple[int, str], list[Decision]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
        with LLM(
            directory,
            load_format="random",
            num_devices=NUM_INSTANCES,
            kv_cache_tokens=options.running * (PROMPT + NEW_TOKENS),
            max_num_seqs=options.running,
            progress=False,
        ) as llm:
            for _ in range(options.rounds):
                for waiting, name in cases:
                    busy = sequences(llm, NUM_INSTANCES * options.running)
                    call = llm._dispatcher.call(
                        measure, llm._engine, name, busy, sequences(llm, waiting), options.repeats
                    )
                    found[waiting, name].append(call.result())
    title = f"{NUM_INSTANCES} instances with {options.running} requests each; medians, in ms"
    table = Table("waiting", "policy", "tick", "snapshot", "decide", "decide, 1 in 20 long", title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    results = []
    for (waiting, name), decisions in found.items():
        fields = ("tick_s", "snapshot_s", "decide_s", "decide_long_s")
        times = {field: median(getattr(decision, field) for decision in decisions) for field in fields}
        results.append({"waiting": waiting, "policy": name} | times)
        table.add_row(str(waiting), name, *(f"{time * 1e3:.2f}" for time in times.values()))
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
