"""`amoeba demo`: short prompts on small instances, and a long one that makes them merge while they answer.

The same work runs twice: the first time compiles what it needs, the second is shown.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from amoeba_jax import LLM, EngineConfig, RequestOutput, SamplingParams
from amoeba_jax.errors import RequestError
from amoeba_jax.model_source import ModelSource
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.tokenizer import Tokenizer
from amoeba_jax.transform import TransformReport
from amoeba_jax.views import MemoryReport
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
SHORT_PER_DEVICE = 2
CHUNK = 64
# Of what all devices hold, for the long prompt, in no more than so many chunks.
LONG_SHARE = 0.75
MAX_CHUNKS = 40
LONG_TOKENS = 24
# Tokens that short requests generate before the merge and after the split, and a few that are on their way.
MARGIN = 16
# Steps that a merge or a split takes.
TRANSFORM_STEPS = 15


@dataclass
class Stream:
    """One request, followed token by token in a thread of its own."""

    llm: LLM
    prompt: list[int]
    params: SamplingParams
    times: list[float] = field(default_factory=list)
    output: RequestOutput | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for output in self.llm.stream(self.prompt, self.params):
                self.output = output
                self.times.append(time.perf_counter())
        except BaseException as error:
            self.error = error

    def wait(self) -> RequestOutput:
        """Until it has ended."""
        self._thread.join()
        if self.error is not None:
            raise self.error
        assert self.output is not None, "a stream has outputs"
        return self.output

    def wait_for(self, num_tokens: int) -> None:
        """Until it has so many tokens."""
        while len(self.times) < num_tokens and self._thread.is_alive():
            time.sleep(0.002)
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class Phase:
    """A stretch of the run. Times in seconds.

    Attributes:
        gaps: times between two tokens of a short request, of all of them, those that ended here.
        running: short requests that had not ended when it ended.
    """

    name: str
    seconds: float
    gaps: np.ndarray
    running: int


@dataclass(frozen=True)
class Run:
    """What happened to the requests, and to the memory."""

    phases: tuple[Phase, ...]
    maps: tuple[tuple[str, MemoryReport], ...]
    reports: tuple[TransformReport, ...]
    short: tuple[RequestOutput, ...]
    long: RequestOutput
    compiled: int
    """Programs that were not ready: unless this is 0, times are of no use."""


@dataclass(frozen=True)
class Work:
    """Prompts, and how much is generated for them."""

    short: list[list[int]]
    long: list[int]
    short_tokens: int
    layers_per_step: int
    kv_cache_tokens: int
    """What each device has room for: its share of the short requests."""

    @property
    def longest_short(self) -> int:
        """Tokens of a short request when it ends."""
        return max(len(prompt) for prompt in self.short) + self.short_tokens

    @property
    def short_params(self) -> SamplingParams:
        # Past the end of an answer, so that all of them run until instances have split again.
        return SamplingParams(temperature=0, max_tokens=self.short_tokens, ignore_eos=True)

    @property
    def long_params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=LONG_TOKENS, ignore_eos=True)


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
            f"{num_devices} x TP1, each with room for {_capacity(llm)} tokens: {len(texts)} short prompts, each with "
            f"{work.short_tokens} tokens of answer"
        )
        with _stage(console, "answered them, undisturbed"):
            alone = llm.generate(work.short, work.short_params)
        if num_devices == 1:
            _print_answers(console, tokenizer, texts, alone)
            console.print("With --num-devices 2 or 4, instances merge for a long prompt, and split again.")
        else:
            with _stage(console, "the same with a merge, a long prompt and a split, which compiles what it needs"):
                run_work(llm, work)
            with _stage(console, "once more"):
                run = run_work(llm, work)
            console.print()
            _print_answers(console, tokenizer, texts, run.short)
            _print_run(console, llm, tokenizer, run)
            _print_agreement(console, llm, work, alone, run)
    console.print(f"\n{time.perf_counter() - start:.1f} s in all")


def plan_work(tokenizer: Tokenizer, num_layers: int, texts: Sequence[str], num_devices: int) -> Work:
    """Short prompts that run throughout, and a long one that takes the room of several devices."""
    chat = uses_chat(tokenizer)

    def encode(text: str) -> list[int]:
        return chat_prompt(tokenizer, text) if chat else tokenizer.encode(text)

    short = [encode(text) for text in texts]
    longest = max(len(prompt) for prompt in short)
    layers_per_step = -(-num_layers // TRANSFORM_STEPS)
    steps, chunks = 0, 0
    if num_devices > 1:
        # A short request generates a token in each step; the long prompt takes a step for each of its chunks.
        steps = 2 * -(-num_layers // layers_per_step) + LONG_TOKENS
        whole = num_devices * SHORT_PER_DEVICE
        while chunks * CHUNK < LONG_SHARE * whole * (longest + 2 * MARGIN + steps + chunks) and chunks < MAX_CHUNKS:
            chunks += 1
    short_tokens = 2 * MARGIN + steps + chunks
    long = _fill(encode, chunks * CHUNK) if chunks else []
    return Work(short, long, short_tokens, layers_per_step, SHORT_PER_DEVICE * (longest + short_tokens))


@contextmanager
def _stage(console: Console, what: str) -> Iterator[None]:
    start = time.perf_counter()
    with CompileWatch() as watch:
        yield
    made = f"{watch.programs} programs made ready, {watch.cached} from the cache" if watch.programs else "all ready"
    console.print(f"  {what} ({time.perf_counter() - start:.1f} s; {made})")


def run_work(llm: LLM, work: Work) -> Run:
    """Short requests run throughout; instances merge, the long request is served, and instances split."""
    with CompileWatch() as watch:
        largest = llm.config.max_tp
        streams = [Stream(llm, prompt, work.short_params) for prompt in work.short]
        for stream in streams:
            stream.wait_for(2)
        marks = [("before", time.perf_counter())]
        maps = [("before", llm.memory())]
        for stream in streams:
            stream.wait_for(MARGIN)
        marks.append(("merge", time.perf_counter()))
        running = [_count_running(streams)]
        with sampled(llm) as between:
            up = llm.transform(largest, layers_per_step=work.layers_per_step)
        marks.append((f"TP{largest}, long request", time.perf_counter()))
        running.append(_count_running(streams))
        maps += half_way(between)
        long = Stream(llm, work.long, work.long_params)
        long.wait_for(1)
        maps.append((f"TP{largest}", llm.memory()))
        long_output = long.wait()
        marks.append(("split", time.perf_counter()))
        running.append(_count_running(streams))
        down = llm.transform(1, layers_per_step=work.layers_per_step)
        marks.append(("after", time.perf_counter()))
        running.append(_count_running(streams))
        maps.append(("after", llm.memory()))
        short = tuple(stream.wait() for stream in streams)
        marks.append(("end", time.perf_counter()))
        running.append(0)
    phases = []
    for (name, start), (_, stop), left in zip(marks, marks[1:], running, strict=False):
        gaps = [
            b - a
            for stream in streams
            for a, b in zip(stream.times, stream.times[1:], strict=False)
            if start <= b < stop
        ]
        phases.append(Phase(name, stop - start, np.array(gaps), left))
    return Run(tuple(phases), tuple(maps), (up, down), short, long_output, watch.programs)


def _count_running(streams: list[Stream]) -> int:
    return sum(stream.output is None or not stream.output.finished for stream in streams)


@contextmanager
def sampled(llm: LLM) -> Iterator[list[MemoryReport]]:
    """Maps of the memory, taken again and again meanwhile."""
    found: list[MemoryReport] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.02):
            found.append(llm.memory())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def half_way(maps: list[MemoryReport]) -> list[tuple[str, MemoryReport]]:
    """The map taken when half of what changes its owner had done so, if there is one."""
    if not maps:
        return []
    sizes = [m.by_owner(0)["kv cache"] for m in maps]
    middle = (sizes[0] + sizes[-1]) / 2
    return [("half way", maps[min(range(len(maps)), key=lambda i: abs(sizes[i] - middle))])]


# Prompts


def _fill(encode: Callable[[str], list[int]], num_tokens: int) -> list[int]:
    """Notes of a voyage, as many as make up so many tokens and no more."""
    things = ("two whales", "a lighthouse", "a red sail", "many gulls", "an island", "a storm far away", "calm water")
    weather = ("clear", "cloudy", "windy", "foggy", "rainy")

    def notes(days: int) -> list[int]:
        lines = [
            f"Day {day}: {weather[day % 5]}, {10 + 7 * day % 60} miles, we saw {things[day * 3 % 7]}."
            for day in range(1, days + 1)
        ]
        question = "In one sentence, what was the voyage like?"
        return encode("\n".join(["These are notes of a voyage.", *lines, question]))

    few, many = 1, num_tokens  # one day fits, and so many do not: a day is several tokens
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if len(notes(middle)) <= num_tokens else (few, middle)
    return notes(few)


def _device_kind() -> str:
    device = jax.local_devices()[0]
    return "virtual CPU devices" if device.platform == "cpu" else f"devices ({device.device_kind})"


# What is printed


def _capacity(llm: LLM) -> int:
    return llm.instances[0].kv_total_pages * llm.config.page_size


def _print_run(console: Console, llm: LLM, tokenizer: Tokenizer, run: Run) -> None:
    console.print(
        f"The long prompt: {len(run.long.prompt_token_ids)} tokens, and one device holds {_capacity(llm)}. "
        "Its answer begins:"
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


def _print_answers(
    console: Console, tokenizer: Tokenizer, texts: Sequence[str], outputs: Sequence[RequestOutput]
) -> None:
    for text, output in zip(texts, outputs, strict=True):
        console.print(f"> {text}", style="bold", markup=False)
        console.print(_visible_text(tokenizer, output), style="green", markup=False)
    console.print()


def _visible_text(tokenizer: Tokenizer, output: RequestOutput) -> str:
    """The answer up to where the model ended it, or with dots where the length limit cut it off."""
    tokens = output.outputs[0].token_ids
    end = next((i for i, token in enumerate(tokens) if token in tokenizer.eos_token_ids), None)
    if end is None:
        return output.outputs[0].text.strip() + " ..."
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


def _print_agreement(console: Console, llm: LLM, work: Work, alone: list[RequestOutput], run: Run) -> None:
    largest = llm.config.max_tp
    llm.set_layout(largest)
    long_alone = llm.generate(work.long, work.long_params)
    for what, layout, expected, got in (
        ("short answers", f"{llm.config.num_devices} x TP1", alone, list(run.short)),
        ("long answer", f"TP{largest}", long_alone, [run.long]),
    ):
        tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in (expected, got)]
        answers, same = agreement(*tokens)
        of_tokens = f"{same} of {sum(map(len, tokens[0]))} tokens"
        if answers == len(got):
            console.print(f"The {what}: equal to an undisturbed run at {layout}, {of_tokens}.")
        else:
            console.print(
                f"The {what}: {answers} of {len(got)} equal to an undisturbed run at {layout}, {of_tokens} come before "
                "the first difference (sums over ranks round differently, which can tip a near tie)."
            )
