"""`amoeba demo`: a server that answers short prompts, a long one for which its instances merge, and what became of it.

The same work runs twice: the first time compiles what it needs, the second is shown.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from rich.console import Console

from amoeba_jax import LLM, EngineConfig, RequestOutput
from amoeba_jax.errors import RequestError
from amoeba_jax.model_source import ModelSource
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.tokenizer import Tokenizer
from serving.commands.demo_report import capacity, print_agreement, print_answers, print_run
from serving.commands.demo_run import (
    CHUNK,
    LONG_TOKENS,
    OPENINGS,
    QUESTIONS,
    SHORT_PER_DEVICE,
    Answer,
    plan_work,
    run_work,
)
from serving.commands.generate import uses_chat
from sharding.ledger import format_bytes, parse_bytes


def run_demo(model: str, num_devices: int, device_memory: str) -> None:
    """Load `model` on `num_devices` devices, do the work, and print what happened on stdout."""
    console = Console(highlight=False)
    start = time.perf_counter()
    source = ModelSource(EngineConfig(model=model))
    source.close()
    if source.directory is None or not (source.directory / "tokenizer.json").exists():
        raise RequestError("the demo asks in words, and the model has no tokenizer.json")
    tokenizer = Tokenizer.from_directory(source.directory)
    texts = (QUESTIONS if uses_chat(tokenizer) else OPENINGS)[: SHORT_PER_DEVICE * num_devices]
    work = plan_work(tokenizer, ModelConfig.from_hf(source.hf_config).num_layers, texts, num_devices)
    llm = LLM(
        model=model,
        num_devices=num_devices,
        device_memory=device_memory,
        kv_cache_tokens=work.kv_cache_tokens,
        progress=sys.stderr.isatty(),
        # Few and small programs, as every sub-mesh of a CPU needs its own: five layers an executable, where compiling
        # all 30 as one takes several times as long. The first run compiles for the second, which must not find its
        # prompts in the cache.
        prefix_caching=False,
        max_num_seqs=2 * SHORT_PER_DEVICE,
        max_num_batched_tokens=CHUNK,
        max_model_len=max(work.longest_short, len(work.long) + LONG_TOKENS),
        segment_layers=5,
    )
    with llm:
        devices = f"{num_devices} {_device_kind()} of {format_bytes(parse_bytes(device_memory))}"
        console.print(f"[bold]{llm.name}[/bold]: {devices} each, loaded in {time.perf_counter() - start:.1f} s")
        console.print(
            f"{num_devices} x TP1, each with room for {capacity(llm)} tokens: {len(texts)} short prompts, each with "
            f"{work.short_tokens} tokens of answer"
        )
        with _stage(console, llm, "answered them, undisturbed"):
            alone = _answers(llm.generate(work.short, work.short_params))
        if num_devices == 1:
            print_answers(console, tokenizer, texts, alone)
            console.print("With --num-devices 2 or 4, instances merge for a long prompt, and split again.")
        else:
            with _stage(console, llm, "the same through the server, with a long prompt, which compiles what it needs"):
                run_work(llm, work)
            with _stage(console, llm, "once more"):
                run = run_work(llm, work)
            console.print()
            print_answers(console, tokenizer, texts, run.short)
            print_run(console, llm, tokenizer, run)
            llm.set_layout(llm.config.max_tp)
            (long_alone,) = _answers(llm.generate(work.long, work.long_params))
            layouts = f"{num_devices} x TP1", f"TP{llm.config.max_tp}"
            print_agreement(console, "short answers", layouts[0], alone, list(run.short))
            print_agreement(console, "long answer", layouts[1], [long_alone], [run.long])
    console.print(f"\n{time.perf_counter() - start:.1f} s in all")


@contextmanager
def _stage(console: Console, llm: LLM, what: str) -> Iterator[None]:
    start = time.perf_counter()
    before = set(llm.executables())
    yield
    seconds = time.perf_counter() - start
    new = [info for info in llm.executables() if info not in before]
    cached = sum(info.cached for info in new)
    programs = f"{len(new)} programs compiled or loaded, {cached} from the cache" if new else "all programs were ready"
    console.print(f"  {what} ({seconds:.1f} s; {programs})")


def _answers(outputs: list[RequestOutput]) -> list[Answer]:
    return [Answer(list(o.prompt_token_ids), o.outputs[0].token_ids, o.outputs[0].text) for o in outputs]


def _device_kind() -> str:
    device = jax.local_devices()[0]
    return "virtual CPU devices" if device.platform == "cpu" else f"devices ({device.device_kind})"
