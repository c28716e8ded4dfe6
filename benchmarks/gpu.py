"""Measurements of kernels, steps, the server and changes of degree on GPUs, in one run of at most 8 minutes.

    python benchmarks/gpu.py [--parts kernels,experts,decode,server,changes] [--model DIRECTORY] [--minutes 8]
        [--json gpu.json]
    python benchmarks/gpu.py --tiny      # a tiny model on virtual CPU devices, to check that everything runs

Weights are random. By default, the model has the shape of Llama-3.1-8B, or of Llama-3.2-3B if the GPU has less than 54
GB. `--model` names a directory with another config.json. At the start, the device's bandwidth is measured by adding one
to a large array, and its FLOP rate by a large matrix product. The bound of a step is the longer of two times: reading
the weights and the cache at this bandwidth, and computing at this FLOP rate.

The parts share the time. If a part ends early, the later parts get the time that is left. If the time of a part is used
up, the part stops and keeps the rows that it has. If a part fails, its error is printed, the next part runs, and the
exit code is 1.
"""

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from decode import kv_elements, read_elements
from expert_layers import ExpertWork
from gpu_report import ChangeRow, KernelRow, LoadRow, PartSkipped, Row, StepRow, run_parts, show
from overhead import alone_s, serving_s
from rich.console import Console
from server_process import bench
from transformation import Running

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.instances.step import StepPlan
from amoeba_jax.json_object import read_json_object
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.platform import serving_devices
from amoeba_jax.transform.report import TransformReport
from pallas_kernels.paged_attention.bench import Machine, attention, measure_machine
from pallas_kernels.paged_attention.measure import Workload, compare, memory_probe
from serving.commands.local_server import local_server
from serving.simulator.device_spec import device_names, find_device

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
}
LLAMA_8B = _LLAMA | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}
LLAMA_3B = _LLAMA | {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}
TINY_MODEL = _LLAMA | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
LARGE_GPU_BYTES = 40e9
"""Minimum bytes that JAX may allocate on a GPU to use the 8B model.

By default, JAX allocates three quarters of the GPU's memory.
"""
PART_SHARES = {"kernels": 2, "experts": 1, "decode": 3, "server": 2, "changes": 5}
"""Parts in their order, and their shares of the time."""
ATTENTION_MEMORY_SHARE = 8
"""Attention is measured with a cache of at most this fraction of the GPU's memory."""
TRIES = 3


@dataclass(frozen=True)
class Sizes:
    """Amounts of work.

    Attributes:
        decodes: (batch size, context) of each measured call of decode attention.
        chunks: (new tokens, earlier tokens) of each measured call of prefill attention.
        experts: measured layers of experts.
        batches: batch sizes of the measured decode steps on one device.
        prompt: prompt tokens of each request before the measured decode steps.
        steps: number of measured decode steps.
        prompts: lengths of the prompts whose prefill is measured.
        loads: options of `amoeba bench` for each load, by name of the load.
        engine: arguments of `LLM` for the engine on one device.
        max_devices: maximum number of devices whose degree changes.
        group_batches: batch sizes of the decode steps on each instance of a higher degree.
        running: requests on each device while degrees change, and prompt tokens of each request.
        changing: arguments of `LLM` for the engine whose degrees change.
    """

    decodes: tuple[tuple[int, int], ...]
    chunks: tuple[tuple[int, int], ...]
    experts: tuple[ExpertWork, ...]
    batches: tuple[int, ...]
    prompt: int
    steps: int
    prompts: tuple[int, ...]
    loads: dict[str, dict[str, Any]]
    engine: dict[str, Any]
    max_devices: int
    group_batches: tuple[int, ...]
    running: tuple[int, int]
    changing: dict[str, Any]


def loads(num_prompts: int, tokens: int, long_tokens: int, output: int, per_minute: int, seconds: int) -> dict:
    """Return the options of `amoeba bench` for two loads, by name.

    In "all at once", `num_prompts` requests arrive at the same time. In "short and long", `per_minute` short requests
    and `per_minute / 15` long requests arrive in each minute.

    Args:
        tokens: prompt tokens of short requests in "short and long", and mean prompt tokens in "all at once".
        long_tokens: prompt tokens of long requests.
        output: output tokens of each request in "short and long", and mean output tokens in "all at once".
        seconds: duration of the arrivals in "short and long".
    """
    return {
        "all at once": {
            "dataset-name": "random",
            "num-prompts": num_prompts,
            "random-input-len": tokens,
            "random-output-len": output,
            "random-range-ratio": 0.8,
        },
        "short and long": {
            "dataset-name": "mix",
            "duration": seconds,
            "short-input-len": tokens,
            "short-output-len": output,
            "short-per-minute": per_minute,
            "long-input-len": long_tokens,
            "long-output-len": output,
            "long-per-minute": per_minute / 15,
        },
    }


FULL = Sizes(
    decodes=tuple((batch, n) for n in (1024, 4096, 32768) for batch in (1, 8, 64, 256)),
    chunks=((2048, 0), (2048, 8192), (2048, 30720)),
    # A rank of Qwen3-30B-A3B at TP4EP4, and a rank of gpt-oss-20b.
    experts=tuple(
        ExpertWork(tokens, *sizes)
        for sizes in ((32, 2, 2048, 768), (8, 1, 2880, 2880))
        for tokens in (1, 8, 64, 512, 2048)
    ),
    batches=(1, 8, 32, 64, 128, 256),
    prompt=128,
    steps=48,
    prompts=(512, 2048, 8192),
    loads=loads(256, 512, 8192, 128, 450, 20),
    engine={"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 16384, "prefix_caching": False},
    max_devices=8,
    group_batches=(1, 16),
    running=(8, 1024),
    changing={"max_num_seqs": 16, "max_model_len": 8192, "prefix_caching": False, "compile_beside": False},
)
_TINY_ENGINE = {"max_model_len": 1024, "device_memory": "256MiB", "kv_cache_tokens": 4096, "prefix_caching": False}
TINY = Sizes(
    decodes=((1, 64), (4, 64)),
    chunks=((16, 0), (16, 32)),
    experts=(ExpertWork(8, 4, 2, 32, 16),),
    batches=(1, 4),
    prompt=16,
    steps=16,
    prompts=(32,),
    loads=loads(4, 16, 64, 8, 120, 2),
    engine=_TINY_ENGINE | {"max_num_seqs": 4, "max_num_batched_tokens": 64},
    max_devices=2,
    group_batches=(2,),
    running=(2, 32),
    changing=_TINY_ENGINE | {"max_num_seqs": 4, "max_num_batched_tokens": 64, "compile_beside": False},
)


@dataclass(frozen=True)
class Work:
    """Work of a program on each device: bytes to read, and floating-point operations."""

    num_bytes: float
    flops: float


@dataclass
class Bench:
    """State that the parts of the benchmark share.

    Attributes:
        bandwidth: measured memory bandwidth in bytes per second.
        attention_bytes: maximum bytes of the cache in measurements of attention.
        llm: engine on one device; None until `single` opens the engine.
    """

    sizes: Sizes
    directory: Path
    model: ModelConfig
    machine: Machine
    bandwidth: float
    attention_bytes: float
    llm: LLM | None = None
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def num_devices(self) -> int:
        """Number of devices for the part `changes`: a power of two, at most `sizes.max_devices`."""
        return 1 << (min(len(jax.local_devices()), self.sizes.max_devices).bit_length() - 1)

    def open(self, **settings: Any) -> LLM:
        """Return a new engine with random weights."""
        return LLM(self.directory, load_format="random", progress=False, **settings)

    def single(self) -> LLM:
        """Return the engine on one device.

        The first call opens the engine and compiles all steps of greedy requests.
        """
        if self.llm is None:
            self.llm = self.open(num_devices=1, **self.sizes.engine)
            compile_steps(self.llm)
        return self.llm

    def close(self) -> None:
        """Free the memory of the engine."""
        if self.llm is not None:
            self.llm.close()
            self.llm = None
        gc.collect()

    def prompt_tokens(self, count: int, length: int) -> list[list[int]]:
        return self.random.integers(3, self.model.vocab_size, (count, length)).tolist()

    def bound(self, work: Work) -> tuple[float, str]:
        """Return the minimum seconds for some work, and the name of the rate that limits it ("memory" or "FLOP")."""
        times = {"memory": work.num_bytes / self.bandwidth, "FLOP": work.flops / self.machine.flop_rate}
        name = max(times, key=lambda name: times[name])
        return times[name], name

    def device_text(self) -> str:
        """Return a line with the device and its measured rates.

        If the simulator knows the device, the line also has the rates of the data sheet.
        """
        machine, kind = self.machine, self.machine.device
        text = f"{kind}: {self.bandwidth / 1e9:,.1f} GB/s, matrix product {machine.flop_rate / 1e12:,.3g} TFLOP/s"
        known = [name for name in device_names() if name.partition("-")[0] in kind.split()]
        if known:
            spec = find_device(known[-1])
            text += f" (data sheet: {spec.memory_bandwidth / 1e9:,.0f} GB/s, {spec.flops / 1e12:,.0f} TFLOP/s)"
        return text


def decode_work(dims: ModelDims, batch: int, context: int, ranks: int = 1) -> Work:
    """Return the work of a decode step on each of `ranks` devices."""
    config, weights = dims.config, read_elements(dims)
    num_bytes = (weights + kv_elements(dims, batch * context)) * jnp.dtype(dims.dtype).itemsize
    attention_flops = 4 * batch * context * config.num_heads * config.head_dim * config.num_layers
    return Work(num_bytes / ranks, (2 * batch * weights + attention_flops) / ranks)


def prefill_work(dims: ModelDims, tokens: int, chunk: int) -> Work:
    """Return the work of computing a prompt in chunks.

    Every chunk reads all weights and computes one token's logits.
    """
    config, weights, chunks = dims.config, read_elements(dims), -(-tokens // chunk)
    head = config.vocab_size * config.hidden_size
    attention_flops = 2 * tokens * (tokens + 1) * config.num_heads * config.head_dim * config.num_layers
    num_bytes = chunks * weights * jnp.dtype(dims.dtype).itemsize
    return Work(num_bytes, 2 * (weights - head) * tokens + 2 * head * chunks + attention_flops)


def compile_steps(llm: LLM) -> None:
    """Compile all steps of greedy requests. `LLM.warmup` would also compile programs that sample."""

    def compile_all() -> None:
        cluster = llm._engine.cluster
        for instance in llm._engine.instances:
            shapes = instance.buckets.all()
            specs = [spec for shape in shapes for spec in instance.runner.specs(StepPlan(shape, ()))]
            for executable in cluster.executables.prepare(specs):
                cluster.reserve_temporaries(executable)

    llm._dispatcher.call(compile_all).result()


def workloads(sizes: Sizes, model: ModelConfig) -> list[Workload]:
    """Return the measured calls of paged attention."""
    base = Workload(1, 1, 1, model.num_kv_heads, model.num_heads // model.num_kv_heads, model.head_dim, page_size=16)
    decodes = [replace(base, batch=batch, tokens=tokens) for batch, tokens in sizes.decodes]
    return decodes + [replace(base, tokens=new + before, queries=new) for new, before in sizes.chunks]


def kernels(run: Bench) -> Iterator[Row]:
    """Measure decode and prefill attention over a header-centric cache."""
    machine, itemsize = run.machine, jnp.dtype(run.machine.dtype).itemsize
    for work in workloads(run.sizes, run.model):
        num_bytes, flops = work.kv_bytes(itemsize), work.flops()
        if num_bytes > run.attention_bytes:
            print(f"left out, its cache takes {num_bytes / 1e9:.1f} GB: {work.name}")
            continue
        call = attention(work, machine, machine.kernel)
        time_s = compare({"call": call}, machine.budget_s / 8)["call"]
        moved, done = num_bytes / time_s, flops / time_s
        name = f"{machine.kernel}: {work.name}"
        yield KernelRow(name, time_s, moved, moved / run.bandwidth, done, done / machine.flop_rate)


def experts(run: Bench) -> Iterator[Row]:
    """Measure the experts of one layer with each method that the device supports. The results of all methods must
    agree."""
    machine, itemsize = run.machine, jnp.dtype(run.machine.dtype).itemsize
    for work in run.sizes.experts:
        calls = work.ways(machine.dtype, gpu=machine.gpu)
        for name, time_s in compare(calls, machine.budget_s / 8).items():
            moved, done = work.elements * itemsize / time_s, work.flops / time_s
            yield KernelRow(
                f"{name}: {work.name}", time_s, moved, moved / run.bandwidth, done, done / machine.flop_rate
            )


def decode_steps(run: Bench, llm: LLM, batch: int) -> Iterator[StepRow]:
    """Measure decode steps with `batch` requests on each instance, if the requests fit into the cache."""
    sizes, instances = run.sizes, llm.instances
    tp = instances[0].tensor_parallel_size
    # Prompts start four at a time, between decode steps of earlier requests.
    new_tokens = batch // 2 + sizes.steps
    if batch * (sizes.prompt + new_tokens) > llm._engine.capacity_tokens(tp):
        print(f"left out, the cache is too small: decode, TP{tp}, batch {batch}")
        return
    context = sizes.prompt + new_tokens - sizes.steps // 2
    alone_s(llm, batch, context, 2)  # Compiles, if needed.
    alone = alone_s(llm, batch, context, sizes.steps)
    time_s = serving_s(llm, run.prompt_tokens(batch * len(instances), sizes.prompt), new_tokens)
    many = f"{len(instances)} x " if len(instances) > 1 else ""
    bound = run.bound(decode_work(llm.dims, batch, context, tp))
    work = f"decode, {many}TP{tp}, batch {batch}, context {context}"
    yield StepRow(work, time_s, alone, len(instances) * batch / time_s, *bound)


def decode(run: Bench) -> Iterator[Row]:
    """Measure decode steps and prompts on one device."""
    llm = run.single()
    for batch in run.sizes.batches:
        yield from decode_steps(run, llm, batch)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for length in run.sizes.prompts:
        times = []
        for _ in range(TRIES + 1):
            start = time.perf_counter()
            llm.generate(run.prompt_tokens(1, length), one)
            times.append(time.perf_counter() - start)
        time_s, work = median(times[1:]), prefill_work(llm.dims, length, llm.config.max_num_batched_tokens)
        yield StepRow(f"prefill, {length} tokens", time_s, None, length / time_s, *run.bound(work))


def server(run: Bench) -> Iterator[Row]:
    """Measure a gRPC server in this process with a client in another process."""
    llm = run.single()
    flags = {"num-warmups": 1, "metric-percentiles": "50,99"}
    with local_server(llm) as server:
        for name, load in run.sizes.loads.items():
            before = llm.stats.compiled_programs
            report = bench(server.address, load | flags)
            yield LoadRow(name, llm.stats.compiled_programs - before, report)


def changes(run: Bench) -> Iterator[Row]:
    """Measure decode steps at each higher degree, and changes between TP1 and that degree."""
    if (count := run.num_devices) < 2:
        raise PartSkipped("it needs two GPUs")
    run.close()
    with run.open(num_devices=count, max_tensor_parallel_size=count, **run.sizes.changing) as llm:
        degree = 2
        while degree <= count:
            llm.set_layout(degree)
            for batch in run.sizes.group_batches:
                yield from decode_steps(run, llm, batch)
            llm.set_layout(1)
            round_trips(run, llm, degree)  # The first round compiles.
            yield from round_trips(run, llm, degree)
            degree *= 2


def round_trips(run: Bench, llm: LLM, degree: int) -> list[ChangeRow]:
    """Return rows for a merge, a split, a pause and a resume, which run while requests decode."""
    per_device, length = run.sizes.running
    prompts = run.prompt_tokens(per_device * llm.num_devices, length)
    running = Running(llm, prompts, llm.max_model_len - length)
    rows = []
    try:
        wait_for_steps(llm)
        rows.append(change_row(f"merge to TP{degree}", llm.transform(degree)))
        wait_for_steps(llm)
        rows.append(change_row(f"split of TP{degree}", llm.transform(1)))
        wait_for_steps(llm)
        rows.append(change_row(f"pause for TP{degree}", llm.transform(degree, release_weights=False, running="pause")))
        urgent = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        llm.generate(run.prompt_tokens(1, length), urgent)
        rows.append(change_row(f"resume from TP{degree}", llm.transform(1)))
        wait_for_steps(llm)
    finally:
        running.end(llm)
    return rows


def wait_for_steps(llm: LLM, count: int = 4) -> None:
    """Wait until `count` more steps for each device have run, summed over all instances."""
    wanted = llm.stats.steps + count * llm.num_devices
    while llm.stats.steps < wanted:
        time.sleep(0.002)


def change_row(name: str, report: TransformReport) -> ChangeRow:
    """Return the row of a transformation. Its time excludes preparation and the wait for compiled programs."""
    groups = report.groups
    return ChangeRow(
        name,
        report.seconds - report.prepare_s - report.waited_s,
        report.moved_bytes,
        sum(group.restored_bytes for group in groups),
        report.extra_bytes,
        report.steps,
        sum(group.paused + group.resumed for group in groups),
    )


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    part.__name__: part for part in (kernels, experts, decode, server, changes)
}


def choose_model(options: argparse.Namespace, memory_bytes: float, scratch: Path) -> Path:
    """Return the directory of the config.json to use. Without `--model`, write the config of a default model to
    `scratch`."""
    if options.model is not None:
        return options.model
    config = TINY_MODEL if options.tiny else LLAMA_8B if memory_bytes >= LARGE_GPU_BYTES else LLAMA_3B
    (scratch / "config.json").write_text(json.dumps(config))
    return scratch


def open_bench(options: argparse.Namespace, scratch: Path) -> Bench:
    """Measure the rates of the device, and return the state that the parts share.

    Raises `SystemExit` if there is no GPU, except with `--tiny`.
    """
    if options.tiny:
        jax.config.update("jax_platforms", "cpu")
    (device,) = serving_devices(1)
    if device.platform != "gpu" and not options.tiny:
        raise SystemExit(f"JAX has no GPU here, only {device.platform}: run with --tiny to check the benchmark")
    memory_bytes = (device.memory_stats() or {}).get("bytes_limit", 1 << 30)
    directory = choose_model(options, memory_bytes, scratch)
    machine = measure_machine(options.tiny)
    probe, moved = memory_probe(machine.probe_bytes)
    bandwidth = moved / compare({"memory": probe}, machine.budget_s / 8)["memory"]
    model = ModelConfig.from_hf(read_json_object(directory / "config.json"))
    sizes = TINY if options.tiny else FULL
    return Bench(sizes, directory, model, machine, bandwidth, memory_bytes / ATTENTION_MEMORY_SHARE)


def part_names(text: str) -> list[str]:
    """Parse comma-separated names of parts, and return the names in the order in which the parts run."""
    names = {name.strip() for name in text.split(",")}
    if unknown := names - PARTS.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def main(argv: list[str] | None = None) -> int:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=part_names, default=list(PARTS), help="names with commas between; default: all")
    parser.add_argument("--model", type=Path, help="directory with a config.json; default: by memory of the GPU")
    parser.add_argument("--minutes", type=float, default=8, help="time of the whole run (default: 8)")
    parser.add_argument("--tiny", action="store_true", help="tiny work on virtual CPU devices; figures mean nothing")
    parser.add_argument("--json", type=Path, help="file for all figures, written after each part")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        run = open_bench(options, Path(scratch))
        model = run.model
        about = {
            "device": run.machine.device,
            "devices": len(jax.local_devices()),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "bandwidth": run.bandwidth,
            "flop_rate": run.machine.flop_rate,
            "model": read_json_object(run.directory / "config.json"),
        }
        console.print(run.device_text(), highlight=False)
        console.print(
            f"JAX {jax.__version__}, Python {about['python']}; {model.family}, {model.num_layers} layers of width "
            f"{model.hidden_size}, {jnp.dtype(run.machine.dtype)}, random weights",
            highlight=False,
        )

        def done(name: str, result: dict[str, Any]) -> None:
            show(name, result, console)
            results[name] = result | {"rows": [{"kind": type(row).TITLE} | asdict(row) for row in result["rows"]]}
            if options.json:
                options.json.write_text(json.dumps({"about": about, "parts": results}, indent=1) + "\n")

        try:
            shares = PART_SHARES | ({"changes": 0.1} if run.num_devices < 2 else {})
            parts = {name: (partial(PARTS[name], run), shares[name]) for name in options.parts}
            run_parts(parts, options.minutes * 60 - (time.perf_counter() - start), done)
        finally:
            run.close()
    return int(any(result["status"] == "failed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
