"""The work of `amoeba demo`: short prompts on small instances, and a long one for which they merge while they answer.

All of it goes through a gRPC server, whose scheduler decides when instances merge and split.
"""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from amoeba_jax import LLM, EngineConfig, SamplingParams
from amoeba_jax.client import Chunk, Client
from amoeba_jax.tokenizer import Tokenizer
from amoeba_jax.transform.report import TransformReport
from amoeba_jax.views import MemoryReport
from serving.commands.generate import chat_prompt, uses_chat
from serving.commands.live_view import live_view
from serving.commands.local_server import local_server
from serving.runtime.scheduling_config import SchedulingConfig
from sharding.owners import Owner

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
# Of what all devices hold, for the long prompt, in no more than that many chunks.
LONG_SHARE = 0.75
MAX_CHUNKS = 40
LONG_TOKENS = 24
# Tokens that short requests generate before the merge and after the split, and a few that are in flight.
MARGIN = 20
# Seconds for which the merged instance waits for another long request: not long, as there is none.
LINGER_S = 0.25
# Steps that a merge or a split takes.
TRANSFORM_STEPS = 15


@dataclass(frozen=True)
class Answer:
    """What was generated for a prompt."""

    prompt: list[int]
    token_ids: tuple[int, ...]
    text: str


@dataclass
class Stream:
    """One request to a server, followed token by token in a thread of its own. Times by `time.perf_counter()`."""

    client: Client
    prompt: list[int]
    params: SamplingParams
    times: list[float] = field(default_factory=list)
    """When each of its tokens came."""
    ended_at: float | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for chunk in self.client.stream(self.prompt, self.params):
                self._chunks.append(chunk)
                self.times += [time.perf_counter()] * len(chunk.token_ids)
        except BaseException as error:
            self.error = error
        self.ended_at = time.perf_counter()

    def wait(self) -> Answer:
        """Until it has ended."""
        self._thread.join()
        self.check()
        tokens = tuple(token for chunk in self._chunks for token in chunk.token_ids)
        return Answer(self.prompt, tokens, "".join(chunk.text for chunk in self._chunks))

    def wait_for(self, num_tokens: int) -> None:
        """Until it has that many tokens."""
        while len(self.times) < num_tokens and self._thread.is_alive():
            time.sleep(0.002)
        self.check()

    def check(self) -> None:
        """Raise what it failed with, if it has."""
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
    short: tuple[Answer, ...]
    long: Answer
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


def plan_work(tokenizer: Tokenizer, num_layers: int, texts: Sequence[str], num_devices: int) -> Work:
    """Short prompts that run throughout, and a long one that takes the room of several devices."""
    chat = uses_chat(tokenizer)

    def encode(text: str) -> list[int]:
        return chat_prompt(tokenizer, text) if chat else tokenizer.encode(text)

    short = [encode(text) for text in texts]
    longest = max(len(prompt) for prompt in short)
    layers_per_step = -(-num_layers // TRANSFORM_STEPS)
    page = EngineConfig.page_size

    def device_tokens(short_tokens: int) -> int:
        return SHORT_PER_DEVICE * -(-(longest + short_tokens) // page) * page

    steps, chunks = 0, 0
    if num_devices > 1:
        # A short request generates a token in each step; the long prompt takes a step for each of its chunks.
        steps = 2 * -(-num_layers // layers_per_step) + LONG_TOKENS
        share = LONG_SHARE * num_devices
        while chunks * CHUNK < share * device_tokens(2 * MARGIN + steps + chunks) and chunks < MAX_CHUNKS:
            chunks += 1
    short_tokens = 2 * MARGIN + steps + chunks
    long = _fill(encode, chunks * CHUNK) if chunks else []
    return Work(short, long, short_tokens, layers_per_step, device_tokens(short_tokens))


def run_work(llm: LLM, work: Work) -> Run:
    """Short requests run throughout; the server's scheduler merges instances for the long one, and splits them."""
    largest = llm.config.max_tp
    ended: list[tuple[float, TransformReport]] = []
    num_programs = llm.stats.compiled_programs
    scheduling = SchedulingConfig(merge_to=largest, linger_s=LINGER_S, layers_per_step=work.layers_per_step)
    with (
        local_server(llm, scheduling, on_report=lambda r: ended.append((time.perf_counter(), r))) as (target, _),
        Client(target) as client,
        live_view(client, sys.stderr.isatty()),
    ):
        streams = [Stream(client, prompt, work.short_params) for prompt in work.short]
        for stream in streams:
            stream.wait_for(2)
        start = time.perf_counter()
        maps = [("before", llm.memory())]
        for stream in streams:
            stream.wait_for(MARGIN)
        with sampled(llm) as between:
            long = Stream(client, work.long, work.long_params)
            _wait_for(llm, ended, 1, long)
        maps += half_way(between)
        long.wait_for(1)
        maps.append((f"TP{largest}", llm.memory()))
        long_answer = long.wait()
        _wait_for(llm, ended, 2, long)
        maps.append(("after", llm.memory()))
        short = tuple(stream.wait() for stream in streams)
    (merged_at, up), (split_at, down) = ended
    marks = [
        ("before", start),
        ("merge", merged_at - up.seconds),
        (f"TP{largest}, long request", merged_at),
        ("split", split_at - down.seconds),
        ("after", split_at),
        ("end", max(stream.ended_at or 0.0 for stream in streams)),
    ]
    phases = tuple(_phase(name, start, stop, streams) for (name, start), (_, stop) in itertools.pairwise(marks))
    return Run(phases, tuple(maps), (up, down), short, long_answer, llm.stats.compiled_programs - num_programs)


def _wait_for(llm: LLM, ended: list, count: int, long: Stream) -> None:
    """Until that many transformations have ended. Raises what the long request or the engine failed with."""
    while len(ended) < count:
        long.check()
        _ = llm.instances
        time.sleep(0.01)


def _phase(name: str, start: float, stop: float, streams: list[Stream]) -> Phase:
    gaps = [b - a for stream in streams for a, b in itertools.pairwise(stream.times) if start <= b < stop]
    running = sum(stream.ended_at is None or stream.ended_at > stop for stream in streams)
    return Phase(name, stop - start, np.array(gaps), running)


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
    sizes = [m.by_owner(0)[Owner.KV_CACHE] for m in maps]
    middle = (sizes[0] + sizes[-1]) / 2
    return [("half way", maps[min(range(len(maps)), key=lambda i: abs(sizes[i] - middle))])]


# Prompts


def _fill(encode: Callable[[str], list[int]], num_tokens: int) -> list[int]:
    """Notes of a voyage, as many as make up that many tokens and no more."""
    things = ("two whales", "a lighthouse", "a red sail", "many gulls", "an island", "a storm far away", "calm water")
    weather = ("clear", "cloudy", "windy", "foggy", "rainy")

    def notes(days: int) -> list[int]:
        lines = [
            f"Day {day}: {weather[day % 5]}, {10 + 7 * day % 60} miles, we saw {things[day * 3 % 7]}."
            for day in range(1, days + 1)
        ]
        question = "In one sentence, what was the voyage like?"
        return encode("\n".join(["These are notes of a voyage.", *lines, question]))

    few, many = 1, num_tokens  # one day fits, and that many do not: a day is several tokens
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if len(notes(middle)) <= num_tokens else (few, middle)
    return notes(few)
