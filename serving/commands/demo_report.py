"""What `amoeba demo` prints of its run."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from amoeba_jax import LLM
from amoeba_jax.tokenizer import Tokenizer
from amoeba_jax.views import MemoryReport
from serving.commands.demo_run import Answer, Run
from sharding.ledger import format_bytes


def capacity(llm: LLM) -> int:
    """Tokens that the first instance holds."""
    return llm.instances[0].kv_total_pages * llm.config.page_size


def print_run(console: Console, llm: LLM, tokenizer: Tokenizer, run: Run) -> None:
    """The long answer, what the short requests saw, the memory, and what the transformations did."""
    console.print(
        f"The long prompt: {len(run.long.prompt)} tokens, and one device holds {capacity(llm)}. Its answer begins:"
    )
    console.print(_visible_text(tokenizer, run.long) + "\n", style="green", markup=False)
    console.print(_phase_table(run, llm.config.num_devices))
    console.print(_memory_map(run.maps))
    for what, report in zip(("merge", "split"), run.reports, strict=True):
        layers = sum(len(group.layers) for group in report.groups)
        restored = sum(group.restored_bytes for group in report.groups)
        console.print(
            f"{what}: {layers} layers in {report.steps} steps, which generated {report.tokens} tokens; "
            f"{format_bytes(report.moved_bytes)} of KV pages moved, {format_bytes(restored)} of weights restored, "
            f"{format_bytes(report.extra_bytes)} of staging a device"
        )
    console.print()


def print_answers(console: Console, tokenizer: Tokenizer, texts: Sequence[str], answers: Sequence[Answer]) -> None:
    """Each question with its answer."""
    for text, answer in zip(texts, answers, strict=True):
        console.print(f"> {text}", style="bold", markup=False)
        console.print(_visible_text(tokenizer, answer), style="green", markup=False)
    console.print()


def _visible_text(tokenizer: Tokenizer, answer: Answer) -> str:
    """The answer up to where the model ended it, or with dots where the length limit cut it off."""
    tokens = answer.token_ids
    end = next((i for i, token in enumerate(tokens) if token in tokenizer.eos_token_ids), None)
    if end is None:
        return answer.text.strip() + " ..."
    return tokenizer.decode(tokens[:end]).strip()


def _phase_table(run: Run, devices: int) -> Table:
    table = Table(title="what the short requests saw")
    for name in ("", "seconds", "tokens", "per token", "longest", "still running"):
        table.add_column(name, justify="left" if not name else "right")
    names = {"before": f"{devices} x TP1", "after": f"{devices} x TP1 again"}
    for phase in run.phases:
        gaps = phase.gaps * 1e3
        table.add_row(
            names.get(phase.name, phase.name),
            f"{phase.seconds:.2f}",
            str(len(gaps)),
            f"{np.median(gaps):.0f} ms" if len(gaps) else "",
            f"{gaps.max():.0f} ms" if len(gaps) else "",
            str(phase.running),
        )
    table.caption = "time between two tokens of a request: median, longest"
    if run.compiled:
        table.caption += f"; {run.compiled} programs were compiled meanwhile, so it is too slow"
    return table


_MAP_WIDTH = 36
_MAP_PARTS = (
    ("weights", "blue", "#"),
    ("kv cache in use", "dark_orange", "k"),
    ("kv cache free", "grey50", "."),
)


def _memory_map(maps: tuple[tuple[str, MemoryReport], ...]) -> Text:
    """Who owns the layers' bytes of each device, to scale."""
    text = Text("\nmemory of all layers: ")
    for part, color, letter in _MAP_PARTS:
        text.append(f"{letter} {part}  ", style=color)
    text.append("\n")
    for name, report in maps:
        for device in report.devices:
            sizes = dict.fromkeys((part for part, _, _ in _MAP_PARTS), 0)
            for layer, parts in report.parts(device).items():
                for part, size in parts.items():
                    # Padding is that of weights: the cache's is not told apart from it here.
                    where = part if part in sizes else "weights"
                    sizes[where] += size if layer is not None else 0
            whole = max(sum(sizes.values()), 1)
            text.append(f"{name if device == report.devices[0] else '':<10}device {device} [")
            for part, color, letter in _MAP_PARTS:
                text.append(letter * round(_MAP_WIDTH * sizes[part] / whole), style=color)
            text.append(f"] {format_bytes(sizes['kv cache in use'])} in use\n")
    return text


def agreement(expected: list[tuple[int, ...]], got: list[tuple[int, ...]]) -> tuple[int, int]:
    """How many answers are equal token for token, and how many tokens come before answers first differ."""
    answers = tokens = 0
    for one, other in zip(expected, got, strict=True):
        equal = [a == b for a, b in zip(one, other, strict=True)]
        answers += all(equal)
        tokens += [*equal, False].index(False)
    return answers, tokens


def print_agreement(console: Console, what: str, layout: str, alone: list[Answer], answers: list[Answer]) -> None:
    """Whether answers are those of an undisturbed run at some layout."""
    expected = [answer.token_ids for answer in alone]
    equal, same = agreement(expected, [answer.token_ids for answer in answers])
    of_tokens = f"{same} of {sum(map(len, expected))} tokens"
    if equal == len(answers):
        console.print(f"The {what}: equal to an undisturbed run at {layout}, {of_tokens}.")
    else:
        console.print(
            f"The {what}: {equal} of {len(answers)} equal to an undisturbed run at {layout}, {of_tokens} come before "
            "the first difference (sums over ranks round differently, which can tip a near tie)."
        )
