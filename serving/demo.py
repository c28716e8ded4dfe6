"""`amoeba demo`: the same weights serve as many small instances, as fewer larger ones, and as one."""

import sys
import time
from dataclasses import dataclass

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from amoeba_jax import LLM, RequestOutput, SamplingParams
from serving.compile_watch import CompileWatch
from serving.generate import chat_prompt, uses_chat
from sharding.ledger import format_bytes, parse_bytes

QUESTIONS = (
    "Write three sentences about the sea.",
    "Explain in a few sentences why the sky is blue.",
    "Tell me a short story about a curious fox.",
    "Describe how bread is made.",
    "What should I see on a first visit to Rome?",
    "Why do leaves change their color in autumn?",
    "Give me a plan for learning to play the piano.",
    "What did people use before electric light?",
)
# For models without a chat template: something to go on with.
OPENINGS = (
    "Once upon a time, there was a little girl",
    "One day, a boy named Tim went to the park",
    "The old dog sat by the door and",
    "Lily wanted to bake a big cake",
    "In a small house near the sea",
    "Tom had a red ball. He",
    "The bird looked at the cat and said",
    "It was a sunny day and the children",
)
# Longest prompt that the demo makes room for, in tokens.
PROMPT_ROOM = 96


@dataclass(frozen=True)
class LayoutRun:
    """What one layout did with the prompts. Times in seconds."""

    tensor_parallel_size: int
    num_instances: int
    switch_s: float
    ready_s: float
    """Making the programs ready and running each of them once."""
    programs: int
    cached: int
    """How many of `programs` came from the compile cache."""
    compiled_in_run: int
    """Programs that the measured run still had to make ready: unless this is 0, it is too slow."""
    run_s: float
    outputs: tuple[RequestOutput, ...]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [output.outputs[0].token_ids for output in self.outputs]

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def step_ms(self) -> float:
        """Median over the answers of the time per output token after the first."""
        return 1e3 * float(np.median([output.metrics.tpot_s or 0.0 for output in self.outputs]))


def run_demo(model: str, num_devices: int, device_memory: str, max_tokens: int) -> None:
    """Load `model` on `num_devices` devices, answer 8 prompts in every layout, print the report on stdout."""
    console = Console(highlight=False)
    start = time.perf_counter()
    llm = LLM(
        model=model,
        num_devices=num_devices,
        device_memory=device_memory,
        progress=sys.stderr.isatty(),
        # Few and small programs, as every sub-mesh of a CPU needs its own: one bucket for all prompts, and
        # five layers an executable, where compiling all 30 as one takes several times as long.
        # The first run compiles for the second: it must not find its prompts in the cache.
        prefix_caching=False,
        max_num_seqs=len(QUESTIONS),
        max_num_batched_tokens=64,
        max_model_len=PROMPT_ROOM + max_tokens,
        segment_layers=5,
    )
    with llm:
        loaded_s = time.perf_counter() - start
        devices = f"{num_devices} {_device_kind()} of {format_bytes(parse_bytes(device_memory))}"
        console.print(f"[bold]{llm.name}[/bold]: {devices} each, loaded in {loaded_s:.1f} s")
        texts = QUESTIONS if uses_chat(llm) else OPENINGS
        runs = []
        for tp in [degree for degree in (1, 2, 4) if degree <= num_devices]:
            runs.append(_run_layout(llm, tp, texts, max_tokens))
            console.print(_progress_line(runs[-1]))
        console.print()
        _print_answers(console, llm, texts, runs[0])
        console.print(_layout_table(runs))
        _print_agreement(console, runs)
        console.print()
        console.print(llm.memory().table())
        console.print("At TP4 each device lends the FFN weights that it does not need to the KV cache.")
    console.print(f"\n{time.perf_counter() - start:.1f} s in all")


def _run_layout(llm: LLM, tp: int, texts: tuple[str, ...], max_tokens: int) -> LayoutRun:
    """Change to `TP tp`, run the work once for its programs, then measure it."""
    switch_s = llm.set_layout(tp)
    prompts = [chat_prompt(llm, text) for text in texts] if uses_chat(llm) else list(texts)
    start = time.perf_counter()
    with CompileWatch() as warming:
        # The same work: decodes run beside prompts, so the steps in between have shapes of their own.
        _answer(llm, prompts, max_tokens)
    ready_s = time.perf_counter() - start
    start = time.perf_counter()
    with CompileWatch() as measured:
        outputs = _answer(llm, prompts, max_tokens)
    run_s = time.perf_counter() - start
    return LayoutRun(
        tensor_parallel_size=tp,
        num_instances=len(llm.instances),
        switch_s=switch_s,
        ready_s=ready_s,
        programs=warming.programs,
        cached=warming.cached,
        compiled_in_run=measured.programs,
        run_s=run_s,
        outputs=tuple(outputs),
    )


def _answer(llm: LLM, prompts: list[str] | list[list[int]], max_tokens: int) -> list[RequestOutput]:
    # Past the end of an answer, so that the batch keeps its size: equal work in every layout.
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate(prompts, params)


def agreement(reference: LayoutRun, other: LayoutRun) -> tuple[int, int]:
    """How many answers are equal token for token, and how many tokens come before answers first differ."""
    answers = tokens = 0
    for expected, got in zip(reference.tokens, other.tokens, strict=True):
        equal = [a == b for a, b in zip(expected, got, strict=True)]
        answers += all(equal)
        tokens += [*equal, False].index(False)
    return answers, tokens


def _device_kind() -> str:
    device = jax.local_devices()[0]
    return "virtual CPU devices" if device.platform == "cpu" else f"devices ({device.device_kind})"


def _layout_name(run: LayoutRun) -> str:
    return f"{run.num_instances} x TP{run.tensor_parallel_size}"


def _progress_line(run: LayoutRun) -> str:
    compiled = f"{run.programs - run.cached} of {run.programs} programs compiled"
    return f"  {_layout_name(run)}: ready in {run.ready_s:.1f} s ({compiled}), answered in {run.run_s:.1f} s"


def _print_answers(console: Console, llm: LLM, texts: tuple[str, ...], run: LayoutRun) -> None:
    for text, output in zip(texts, run.outputs, strict=True):
        console.print(f"> {text}", style="bold", markup=False)
        console.print(_visible_text(llm, output), style="green", markup=False)
    console.print()


def _visible_text(llm: LLM, output: RequestOutput) -> str:
    """The answer up to where the model ended it, or with dots where the length limit cut it off."""
    tokens, tokenizer = output.outputs[0].token_ids, llm.tokenizer
    end = next((i for i, token in enumerate(tokens) if tokenizer and token in tokenizer.eos_token_ids), None)
    if tokenizer is None or end is None:
        return output.outputs[0].text.strip() + " ..."
    return tokenizer.decode(tokens[:end]).strip()


def _layout_table(runs: list[LayoutRun]) -> Table:
    table = Table(title="the same prompts in every layout")
    for name in ("layout", "switch", "ready in", "compiled", "tokens/s", "time per token", "equal to TP1"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for run in runs:
        _, equal = agreement(runs[0], run)
        table.add_row(
            _layout_name(run),
            f"{1e3 * run.switch_s:.0f} ms",
            f"{run.ready_s:.1f} s",
            f"{run.programs - run.cached} of {run.programs}",
            f"{run.num_tokens / run.run_s:.1f}" + ("" if run.compiled_in_run == 0 else " (compiled)"),
            f"{run.step_ms:.0f} ms",
            f"{equal} of {run.num_tokens}",
        )
    table.caption = "tokens/s: prompts and answers together, after every program has run once"
    return table


def _print_agreement(console: Console, runs: list[LayoutRun]) -> None:
    for run in runs[1:]:
        answers, tokens = agreement(runs[0], run)
        name = f"The answers of TP{run.tensor_parallel_size}"
        of_tokens = f"{tokens} of {run.num_tokens} tokens"
        if answers == len(run.outputs):
            console.print(f"{name} are equal to TP1's, token for token ({of_tokens}).")
        else:
            console.print(
                f"{name} differ from TP1's: {answers} of {len(run.outputs)} are equal, and {of_tokens} come "
                "before the first difference (sums over ranks round differently, which can tip a near tie)."
            )
