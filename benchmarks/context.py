"""Longest context in a memory budget, with fixed degrees and with instances that merge on demand.

    python benchmarks/context.py [--device-memory 640MiB] [--json context.json]

The model has SmolLM2's shape and random weights, and runs on four virtual CPU devices. For each case, the table has the
tokens that the largest instance holds, and the longest prompt that this instance has answered. The case "changing"
starts as 4 x TP1, serves short requests all the time, and merges. The row "TP4 alone" is only computed, for a server
that loads a quarter of all matrices on each device.
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from decode import MODELS
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, SamplingParams

NEW_TOKENS = 4


def longest(llm: LLM) -> int:
    return max(view.kv_total_pages for view in llm.instances) * llm.config.page_size


def answered(llm: LLM, num_tokens: int) -> int:
    """Serve a request whose prompt and answer have `num_tokens` tokens together, and return the prompt's length."""
    prompt = np.random.default_rng(0).integers(0, llm.dims.config.vocab_size, num_tokens - NEW_TOKENS).tolist()
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == NEW_TOKENS
    return len(prompt)


def measure(directory: str, memory: str, tp: int, changes: bool) -> dict[str, Any]:
    with LLM(
        directory,
        load_format="random",
        num_devices=4,
        tensor_parallel_size=tp,
        device_memory=memory,
        max_num_seqs=2,
        max_num_batched_tokens=512,
        progress=False,
    ) as llm:
        if not changes:
            return {"holds": longest(llm), "answered": answered(llm, longest(llm)), "budget": budget(llm)}
        short = [[1, 2, 3, n] for n in range(4)]
        ends = threading.Event()
        finished = [0]

        def serve_short() -> None:
            while not ends.is_set():
                finished[0] += len(llm.generate(short, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)))

        thread = threading.Thread(target=serve_short)
        thread.start()
        while not any(view.running for view in llm.instances):
            time.sleep(0.01)
        llm.transform(4)
        # The short requests use some tokens meanwhile.
        held, room = longest(llm), 4 * (4 + 32 + llm.config.page_size)
        before = finished[0]
        result = {"holds": held, "answered": answered(llm, held - room), "budget": budget(llm)}
        llm.transform(1)
        ends.set()
        thread.join()
        return result | {"short_answered": finished[0] - before}


def budget(llm: LLM) -> dict[str, int]:
    plan = llm._engine.cluster.memory_plan
    dims = llm.dims
    itemsize = jnp.dtype(dims.dtype).itemsize
    sharded = sum(spec.num_elements for spec in llm._engine.cluster.weights.specs.values() if spec.num_shards > 1)
    left = plan.budget_bytes - plan.activation_bytes - plan.sampling_bytes - plan.staging_bytes
    weights = plan.weight_bytes - sharded * itemsize * 3 // 4
    token_bytes = plan.page_bytes * dims.config.num_layers // dims.page_size
    return {"tp4_alone": (left - weights) * 4 // token_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-memory", default="640MiB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = MODELS["SmolLM2-135M"] | {"max_position_embeddings": 1 << 20}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        for name, tp, changes in (("TP1", 1, False), ("TP2", 2, False), ("TP4", 4, False), ("changing", 1, True)):
            results[name] = measure(scratch, options.device_memory, tp, changes)
            print(f"{time.strftime('%X')} {name}: {results[name]}", flush=True)
    table = Table(title=f"longest context in {options.device_memory} a device")
    for column in ("", "holds, tokens", "of TP4", "longest prompt answered"):
        table.add_column(column, justify="right" if column else "left")
    fixed = results["TP4"]["holds"]
    for name, result in results.items():
        table.add_row(name, f"{result['holds']:,}", f"{result['holds'] / fixed:.1%}", f"{result['answered']:,}")
    alone = results["TP4"]["budget"]["tp4_alone"]
    table.add_row("TP4 alone (computed)", f"{alone:,}", f"{alone / fixed:.1%}", "")
    console = Console(width=100)
    console.print(table)
    console.print(f"short requests answered beside the long one: {results['changing']['short_answered']}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
