"""One decode step at TP1: its time, and its shares of the machine's memory bandwidth and FLOP rate.

    python benchmarks/decode.py [--batch 1 8 32] [--context 128] [--json decode.json]

Weights are random. A step reads every weight once, and the KV cache of its sequences once. The machine's bandwidth and
FLOP rate are measured in the same run.
"""

import argparse
import json
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from machine import flop_rate, read_bandwidth, seconds
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.models.decoder import num_parameters
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.programs.batch import StepBatch
from amoeba_jax.programs.step_program import HeadOutput

_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-125M": _LLAMA
    | {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "SmolLM2-135M": _LLAMA
    | {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True, kw_only=True)
class PreparedPlan(StepPlan):
    """Plan of a step with a prepared batch."""

    step: StepBatch

    def batch(self, *_: object) -> StepBatch:
        return self.step


def launch(instance: Instance, step: StepBatch) -> HeadOutput:
    """Launch a step with a prepared batch on an instance, and return its output without waiting for it."""
    plan = PreparedPlan(step.shape, (), step=step)
    return instance.runner.run(instance.runner.prepare(plan, instance.lanes))


def read_elements(dims: ModelDims) -> int:
    """Return the number of weight elements that a step reads, without padding.

    An untied embedding does not count, because a step reads only a few of its rows.
    """
    config = dims.config
    return num_parameters(dims) - (0 if config.tied_embeddings else config.vocab_size * config.hidden_size)


def kv_elements(dims: ModelDims, tokens: int) -> int:
    """Return the number of elements of the keys and values of `tokens` tokens in all layers."""
    config = dims.config
    return 2 * tokens * config.num_kv_heads * config.head_dim * config.num_layers


def measure(llm: LLM, batch: int, context: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of a decode step, and the bytes and floating-point operations that the step needs."""
    engine = llm._engine
    instance = engine.instances[0]
    shape = instance.buckets.step(batch)
    step = StepBatch(shape, instance.tp)
    pages = engine.dims.pages.pages_for(context)
    tables = [instance.lane.pages.allocate(pages) for _ in range(batch)]
    step.set("positions", np.full(batch, context - 1))
    step.set("last_token", np.arange(batch))
    step.set("num_pages", np.full(batch, pages))
    for row, table in enumerate(tables):
        step.set_table(row, table)
    step_s = seconds(lambda: np.asarray(launch(instance, step).argmax_ids), repeats)
    for table in tables:
        instance.lane.pages.free(table)
    itemsize = np.dtype(engine.dims.dtype).itemsize
    matrices = read_elements(engine.dims)
    num_bytes = (matrices + kv_elements(engine.dims, batch * context)) * itemsize
    return {"step_s": step_s, "bytes": num_bytes, "flops": 2 * matrices * batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--max-tp", type=int, default=1, help="maximum degree that the layout of weights supports")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, config in MODELS.items():
            directory = Path(scratch) / name
            directory.mkdir()
            (directory / "config.json").write_text(json.dumps(config))
            llm = LLM(
                directory,
                load_format="random",
                num_devices=options.max_tp,
                device_memory="2GiB",
                max_num_seqs=max(options.batch),
                max_model_len=2048,
                progress=False,
            )
            with llm:
                bandwidth, peak = read_bandwidth(), flop_rate()
                for batch in options.batch:
                    result = measure(llm, batch, options.context, options.repeats)
                    results.append({"model": name, "batch": batch, "bandwidth": bandwidth, "peak": peak} | result)
    device = jax.devices()[0]
    print(f"{platform.machine()} {device.device_kind}, JAX {jax.__version__}, f32, context {options.context}")
    table = Table()
    for column in (
        "model",
        "batch",
        "step ms",
        "tokens/s",
        "GB/s",
        "of read bandwidth",
        "GFLOP/s",
        "of peak",
    ):
        table.add_column(column, justify="left" if column == "model" else "right")
    for r in results:
        rate, flops = r["bytes"] / r["step_s"], r["flops"] / r["step_s"]
        r |= {"bandwidth_share": rate / r["bandwidth"], "flop_share": flops / r["peak"]}
        table.add_row(
            r["model"],
            str(r["batch"]),
            f"{r['step_s'] * 1e3:.1f}",
            f"{r['batch'] / r['step_s']:.0f}",
            f"{rate / 1e9:.1f}",
            f"{r['bandwidth_share']:.0%} of {r['bandwidth'] / 1e9:.1f}",
            f"{flops / 1e9:.0f}",
            f"{r['flop_share']:.0%} of {r['peak'] / 1e9:.0f}",
        )
    Console(width=110).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
