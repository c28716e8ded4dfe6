"""`amoeba demo`: instances serve short requests, merge for a long prompt, and split again."""

import sys
import time
from collections.abc import Sequence

import jax
from rich.console import Console

from amoeba_jax import LLM, EngineConfig, RequestOutput
from amoeba_jax.errors import RequestError
from amoeba_jax.model_source import ModelSource
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.tokenizer import Tokenizer
from serving.commands.demo_report import Check, print_answers, print_report
from serving.commands.demo_run import (
    CHUNK,
    OPENINGS,
    QUESTIONS,
    SEGMENT_LAYERS,
    SHORT_PER_DEVICE,
    Answer,
    Work,
    plan_work,
    run_work,
)
from serving.commands.demo_view import DemoView
from serving.commands.generate import uses_chat
from sharding.ledger import format_bytes, parse_bytes


def run_demo(model: str, num_devices: int, device_memory: str, opens_page: bool = False) -> None:
    """Load a model, serve the requests of the demo, and print a report on stdout.

    Args:
        model: name or directory of a model with a tokenizer.
        num_devices: number of devices. With one device, no instances merge.
        device_memory: memory of each device, such as "1GiB".
        opens_page: whether to show the live page in a browser. With one device there is no page.
    """
    console = Console(highlight=False)
    start = time.perf_counter()
    source = ModelSource(EngineConfig(model=model))
    source.close()
    if source.directory is None or not (source.directory / "tokenizer.json").exists():
        raise RequestError(f"the demo asks questions in text, but {model} has no tokenizer.json")
    tokenizer = Tokenizer.from_directory(source.directory)
    texts = (QUESTIONS if uses_chat(tokenizer) else OPENINGS)[: SHORT_PER_DEVICE * num_devices]
    work = plan_work(tokenizer, ModelConfig.from_hf(source.hf_config).num_layers, texts, num_devices)
    highest = EngineConfig(model=model, num_devices=num_devices).max_tp
    console.print(
        f"Loading {source.name} and compiling its programs: about a minute the first time, seconds when the compile "
        "cache has them."
    )
    llm = LLM(
        model=model,
        num_devices=num_devices,
        device_memory=device_memory,
        kv_cache_tokens=work.kv_cache_tokens,
        progress=sys.stderr.isatty(),
        # All programs are compiled before the first request, so that no measured time includes it. Few and small
        # programs compile fastest.
        warmup=sorted({1, highest}),
        segment_layers=SEGMENT_LAYERS,
        # The same prompts run once more for the check, and must be computed again.
        prefix_caching=False,
        max_num_seqs=2 * SHORT_PER_DEVICE,
        max_num_batched_tokens=CHUNK,
        max_model_len=work.longest,
    )
    with llm:
        memory = format_bytes(parse_bytes(device_memory))
        console.print(f"Ready after {time.perf_counter() - start:.0f} s: {num_devices} {_device_kind()} of {memory}.\n")
        if num_devices == 1:
            print_answers(console, tokenizer, texts, _answers(llm.generate(work.short, work.short_params)))
            console.print("On one device nothing can merge: try --num-devices 2 or 4.")
            return
        with DemoView(console, llm) as view:
            run = run_work(llm, work, texts, view, opens_page)
        console.print("\nChecking: the same requests once more, without a merge or a split ...")
        print_report(console, tokenizer, llm, run, _check(llm, work, run.short, run.long))
    console.print(f"\nThe demo took {time.perf_counter() - start:.0f} s.")


def _check(llm: LLM, work: Work, short: Sequence[Answer], long: Answer) -> Check:
    """Compare the answers of a run with answers that the engine generates without merging or splitting instances."""
    llm.set_layout(1)
    expected = _answers(llm.generate(work.short, work.short_params))
    llm.set_layout(llm.config.max_tp)
    expected += _answers(llm.generate(work.long, work.long_params))
    return Check.compare([answer.token_ids for answer in expected], [a.token_ids for a in (*short, long)])


def _answers(outputs: list[RequestOutput]) -> list[Answer]:
    return [Answer(list(o.prompt_token_ids), o.outputs[0].token_ids, o.outputs[0].text) for o in outputs]


def _device_kind() -> str:
    device = jax.local_devices()[0]
    return "virtual CPU devices" if device.platform == "cpu" else f"devices ({device.device_kind})"
