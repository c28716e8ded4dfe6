"""Decode speed of a model with experts beside transformers, and host time of a release of its weights.

    python benchmarks/moe.py [--parts decode release] [--rounds 3] [--json moe.json]

The model has random weights: 0.41 B parameters, of which 0.09 B are active for a token. Both engines compute in f32 on
all cores, in turn, and the fastest round of each counts. The release is measured with as many layers and experts as
Qwen3-30B-A3B has, and tiny matrices: its host time depends on the number of buffers, not on their size.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import numpy as np
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, SamplingParams

MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
SHALLOW = {"hidden_size": 64, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 256}
RELEASED: dict[str, Any] = {**MODEL, **SHALLOW, "num_attention_heads": 4, "head_dim": 16, "moe_intermediate_size": 16}
PROMPT, NEW_TOKENS = 16, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", nargs="+", choices=("decode", "release"), default=["decode", "release"])
    options = parser.parse_args()
    console, results = Console(width=100), {}
    with tempfile.TemporaryDirectory() as scratch:
        if "decode" in options.parts:
            rows = decode(_directory(Path(scratch) / "model", MODEL), options.batch, options.rounds)
            table = Table("sequences", "amoeba, ms a step", "transformers, ms a step", "ratio")
            for row in rows:
                table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values()))
            console.print(table)
            results["decode"] = rows
        if "release" in options.parts:
            best = release_ms(_directory(Path(scratch) / "released", RELEASED), options.rounds)
            console.print(f"release, 4 devices: {best[0]:.3f} ms of host time a layer, {best[1]:.2f} ms for 48 layers")
            results["release_ms"] = best
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


def _directory(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def decode(directory: Path, batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds of a decode step of both engines, for each number of sequences."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    peer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32).eval()
    most = max(batches)
    settings = {"load_format": "random", "device_memory": "4GiB", "max_num_seqs": most, "max_model_len": 128}
    rows = []
    with LLM(directory, num_devices=1, progress=False, **settings) as llm:
        for count in batches:
            prompts = np.random.default_rng(count).integers(0, MODEL["vocab_size"], (count, PROMPT))
            mine: list[float] = []
            theirs: list[float] = []
            for _ in range(rounds + 1):  # the first round compiles
                mine.append(_step_ms(lambda length, prompts=prompts: _ours(llm, prompts, length)))
                theirs.append(_step_ms(lambda length, prompts=prompts: _theirs(peer, prompts, length)))
            best = min(mine[1:]), min(theirs[1:])
            rows.append(
                {"sequences": count, "amoeba_ms": best[0], "transformers_ms": best[1], "ratio": best[1] / best[0]}
            )
    return rows


def _step_ms(generate: Any) -> float:
    """Return milliseconds of a decode step, from the difference between a long and a short answer."""
    times = []
    for length in (2, 2 + NEW_TOKENS):
        start = time.perf_counter()
        generate(length)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / NEW_TOKENS * 1e3


def _ours(llm: LLM, prompts: np.ndarray, length: int) -> None:
    llm.generate(prompts.tolist(), SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))


def _theirs(peer: Any, prompts: np.ndarray, length: int) -> None:
    import torch

    tokens = torch.from_numpy(prompts)
    with torch.inference_mode():
        peer.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )


def release_ms(directory: Path, rounds: int) -> tuple[float, float]:
    """Return the host time in ms to release the weights on 4 devices for TP4: (mean of a layer, sum of all layers)."""
    settings = {"load_format": "random", "device_memory": "1GiB", "max_num_seqs": 4, "max_model_len": 128}
    with LLM(directory, num_devices=4, max_tensor_parallel_size=4, progress=False, **settings) as llm:
        cluster = llm._engine.cluster

        def release() -> tuple[float, float]:
            group, weights, times = cluster.sub_meshes.group(0, 4), cluster.weights, []
            layers = range(llm.dims.config.num_layers)
            for _ in range(rounds + 1):
                weights.prepare_release(group, 1, 4)
                spent: list[Any] = []
                start = time.perf_counter()
                extents = [weights.release(group, layer, 1, 4, spent) for layer in layers]
                times.append((time.perf_counter() - start) * 1e3)
                for layer, its in enumerate(extents):
                    weights.put_back(group, layer, 4, 1, its)
            return min(times[1:]) / len(layers), min(times[1:])

        return llm._dispatcher.call(release).result()


if __name__ == "__main__":
    main()
