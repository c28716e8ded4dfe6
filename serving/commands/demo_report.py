"""Report of `amoeba demo`: a summary of the run, tables and answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from amoeba_jax import LLM
from amoeba_jax.tokenizer import Tokenizer
from serving.commands.demo_run import Answer, Run
from serving.commands.demo_view import MAX_WIDTH, layer_bytes, memory_bar, memory_legend
from sharding.ledger import format_bytes

_BAR_WIDTH = 36
_NUMBERS = {2: "Two", 4: "Four", 8: "Eight"}


@dataclass(frozen=True)
class Check:
    """Comparison of generated answers with expected answers.

    Attributes:
        answers: number of answers.
        equal: number of answers that equal their expected answer.
        tokens: number of tokens of all answers.
        equal_tokens: number of tokens before the first wrong token of each answer, summed over all answers.
    """

    answers: int
    equal: int
    tokens: int
    equal_tokens: int

    @classmethod
    def compare(cls, expected: Sequence[tuple[int, ...]], found: Sequence[tuple[int, ...]]) -> "Check":
        """Compare the answers `found` with the answers `expected`, and count the equal answers and tokens.

        An answer is a tuple of token ids. The two answers to a request must have the same length.
        """
        same = [[a == b for a, b in zip(one, other, strict=True)] for one, other in zip(expected, found, strict=True)]
        return cls(len(same), sum(map(all, same)), sum(map(len, same)), sum([*s, False].index(False) for s in same))

    def __str__(self) -> str:
        if self.equal == self.answers:
            return f"all {self.answers} answers equal the answers of runs without a merge, token for token."
        return (
            f"{self.equal} of {self.answers} answers equal the answers of runs without a merge, token for token "
            f"(in all, {self.equal_tokens} of {self.tokens} tokens come before a difference: sums over several devices "
            "are rounded differently, which can decide between two tokens of nearly equal probability)."
        )


def print_report(console: Console, tokenizer: Tokenizer, llm: LLM, run: Run, check: Check) -> None:
    """Print the summary of the run, the tables and the answers."""
    console.rule("What happened", style="grey50")
    console.print(_story(llm, run, check))
    console.print()
    console.print(_speed_table(run, llm.config.num_devices, llm.config.max_tp))
    console.print()
    _print_memory(console, run)
    console.print(_change_table(run))
    console.print()
    print_answers(console, tokenizer, [*run.texts, "(the long prompt: notes of a voyage)"], [*run.short, run.long])


def _story(llm: LLM, run: Run, check: Check) -> str:
    degree = llm.config.max_tp
    up, down = run.reports
    return (
        f"{_NUMBERS.get(len(run.short), len(run.short))} instances, each on one device (TP1), were answering short "
        f"requests when a prompt of {len(run.long.prompt)} tokens arrived, but one device has room for "
        f"{run.device_tokens} tokens. "
        f"So {degree} instances merged into one (TP{degree}), in which every device computes 1/{degree} of each layer, "
        "and weights that a device no longer needed became room for the prompt. "
        "After the long answer the instance split again, and each device got its weights back from the others. "
        f"No request was stopped, the short ones got {up.tokens + down.tokens} tokens during the merge and the split, "
        f"and {check}"
    )


def print_answers(console: Console, tokenizer: Tokenizer, texts: Sequence[str], answers: Sequence[Answer]) -> None:
    """Print the first line of each answer beside its request."""
    table = Table(title="Answers", title_justify="left", width=min(console.width, MAX_WIDTH))
    table.add_column("request", no_wrap=True, overflow="ellipsis", ratio=2)
    table.add_column("answer (its beginning)", no_wrap=True, overflow="ellipsis", ratio=3)
    for text, answer in zip(texts, answers, strict=True):
        table.add_row(Text(text), Text(_visible_text(tokenizer, answer), style="green"))
    console.print(table)


def _visible_text(tokenizer: Tokenizer, answer: Answer) -> str:
    """Return the text of an answer before its end-of-text token, as one line."""
    tokens = answer.token_ids
    end = next((i for i, token in enumerate(tokens) if token in tokenizer.eos_token_ids), None)
    text = answer.text if end is None else tokenizer.decode(tokens[:end])
    return " ".join(text.split())


def _speed_table(run: Run, devices: int, degree: int) -> Table:
    table = Table(
        title="Short requests: time between two tokens",
        title_justify="left",
        caption="A gap is the time between two tokens of one request.",
        caption_justify="left",
    )
    for name in ("phase", "seconds", "tokens", "median gap", "longest gap", "requests left"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    names = {
        "before": f"{devices} x TP1",
        "merged": f"TP{degree}",
        "after": f"{devices} x TP1 again",
    }
    for phase in run.phases:
        gaps = phase.gaps * 1e3
        table.add_row(
            names.get(phase.name, phase.name),
            f"{phase.seconds:.1f}",
            str(len(gaps)),
            f"{np.median(gaps):.0f} ms" if len(gaps) else "-",
            f"{gaps.max():.0f} ms" if len(gaps) else "-",
            str(phase.running),
        )
    return table


def _print_memory(console: Console, run: Run) -> None:
    """Print a bar with the memory use of each device, for each moment in `run.maps`."""
    console.print("Memory of each device, without embedding and head", style="italic")
    console.print(memory_legend())
    for name, report in run.maps:
        for device in report.devices:
            line = Text(f"{name if device == report.devices[0] else '':<9}device {device} ")
            line.append(memory_bar(report, device, _BAR_WIDTH))
            used = layer_bytes(report, device)["kv cache in use"]
            console.print(line + Text(f" {format_bytes(used)} in use"), no_wrap=True)
    console.print()


def _change_table(run: Run) -> Table:
    table = Table(title="The two changes", title_justify="left")
    table.add_column("")
    up, down = run.reports
    for name in ("merge", "split"):
        table.add_column(name, justify="right")
    rows = (
        ("seconds", [f"{report.seconds:.1f}" for report in (up, down)]),
        ("steps of the model meanwhile", [str(report.steps) for report in (up, down)]),
        ("tokens generated meanwhile", [str(report.tokens) for report in (up, down)]),
        ("KV cache moved between devices", [format_bytes(report.moved_bytes) for report in (up, down)]),
        (
            "weights copied back",
            [format_bytes(sum(group.restored_bytes for group in report.groups)) for report in (up, down)],
        ),
        ("extra memory, each device", [format_bytes(report.extra_bytes) for report in (up, down)]),
    )
    for name, values in rows:
        table.add_row(name, *values)
    return table
