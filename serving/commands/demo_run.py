"""Run of `amoeba demo`.

A gRPC server serves short requests on small instances. When a long prompt arrives, the scheduler of the server merges
the instances. When the long answer is complete, the scheduler splits the merged instance.
"""

import itertools
import threading
import time
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from amoeba_jax import LLM, EngineConfig, SamplingParams
from amoeba_jax.client import Chunk, Client
from amoeba_jax.tokenizer import Tokenizer
from amoeba_jax.transform.report import TransformReport
from amoeba_jax.views import MemoryReport
from serving.commands.demo_view import DemoView, sampled
from serving.commands.generate import chat_prompt, uses_chat
from serving.commands.local_server import local_server
from serving.grpc_server.config import ServerConfig
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
# Prompts for models without a chat template.
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
SHORT_PER_DEVICE = 1
# Tokens of a prompt chunk.
CHUNK = 32
# Length of the long prompt: this share of the KV cache of the devices that merge, but at most so many chunks.
LONG_SHARE = 0.75
MAX_CHUNKS = 40
LONG_TOKENS = 16
# Tokens of a short request before the long prompt arrives, and from the end of the long answer to the end. In
# the second part, the merged instance first waits for another long request.
MARGIN, AFTER = 8, 24
# Seconds for which the merged instance waits for another long request.
LINGER_S = 0.25
# Layers of a program. A merge or a split changes so many layers between two steps.
SEGMENT_LAYERS = 5


@dataclass(frozen=True)
class Answer:
    """Prompt and generated tokens of a finished request."""

    prompt: list[int]
    token_ids: tuple[int, ...]
    text: str


@dataclass
class Stream:
    """Request that has been sent to a server. A thread receives the generated tokens.

    Attributes:
        label: text that the live view shows.
        times: arrival time of each token, a value of `time.perf_counter()`.
        ended_at: time at which the request ended, a value of `time.perf_counter()`. None: the request has not ended.
        error: exception that ended the request, or None.
    """

    client: Client
    label: str
    prompt: list[int]
    params: SamplingParams
    times: list[float] = field(default_factory=list)
    ended_at: float | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        """Number of tokens received so far."""
        return len(self.times)

    @property
    def max_tokens(self) -> int:
        """Number of tokens that the request will generate."""
        return self.params.max_tokens or 1

    def _follow(self) -> None:
        try:
            for chunk in self.client.stream(self.prompt, self.params):
                self._chunks.append(chunk)
                self.times += [time.perf_counter()] * len(chunk.token_ids)
        except BaseException as error:
            self.error = error
        self.ended_at = time.perf_counter()

    def wait(self) -> Answer:
        """Wait until the request has ended, and return the answer."""
        self._thread.join()
        self.check()
        tokens = tuple(token for chunk in self._chunks for token in chunk.token_ids)
        return Answer(self.prompt, tokens, "".join(chunk.text for chunk in self._chunks))

    def wait_for(self, num_tokens: int) -> None:
        """Wait until `num_tokens` tokens have arrived, or until the request has ended.

        Raises the error that ended the request, if there is one.
        """
        while len(self.times) < num_tokens and self._thread.is_alive():
            time.sleep(0.002)
        self.check()

    def check(self) -> None:
        """Raise the error that ended the request, if there is one."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class Phase:
    """Part of a demo run between two events, such as the start and the end of the merge.

    Attributes:
        gaps: seconds between consecutive tokens of each short request. A gap belongs to the phase in which its second
            token arrived.
        running: number of short requests that were still running at the end of the phase.
    """

    name: str
    seconds: float
    gaps: np.ndarray
    running: int


@dataclass(frozen=True)
class Run:
    """Result of a demo run.

    Attributes:
        phases: phases in order: before, merge, merged, split, after.
        maps: memory reports in the order of time, as pairs (name of the moment, report).
        reports: reports of the merge and of the split.
        texts: prompts of the short requests.
        short: answers to the short requests.
        long: answer to the long prompt.
        device_tokens: number of tokens that fit the KV cache of an instance of one device.
    """

    phases: tuple[Phase, ...]
    maps: tuple[tuple[str, MemoryReport], ...]
    reports: tuple[TransformReport, TransformReport]
    texts: tuple[str, ...]
    short: tuple[Answer, ...]
    long: Answer
    device_tokens: int


@dataclass(frozen=True)
class Work:
    """Prompts of a demo run, and lengths of their answers.

    Attributes:
        short: token ids of the short prompts.
        long: token ids of the long prompt. Empty if there is only one device.
        short_tokens: number of tokens to generate for each short prompt.
        kv_cache_tokens: minimum size of each device's KV cache in tokens, so that the short requests fit.
    """

    short: list[list[int]]
    long: list[int]
    short_tokens: int
    kv_cache_tokens: int

    @property
    def longest(self) -> int:
        """Number of tokens of the longest request, prompt and answer together."""
        return max(max(len(prompt) for prompt in self.short) + self.short_tokens, len(self.long) + LONG_TOKENS)

    @property
    def short_params(self) -> SamplingParams:
        """Sampling parameters of the short requests.

        With these parameters, a request does not stop at end-of-text tokens. The short requests therefore run until the
        split has ended.
        """
        return SamplingParams(temperature=0, max_tokens=self.short_tokens, ignore_eos=True)

    @property
    def long_params(self) -> SamplingParams:
        """Sampling parameters of the long request."""
        return SamplingParams(temperature=0, max_tokens=LONG_TOKENS, ignore_eos=True)


def plan_work(tokenizer: Tokenizer, num_layers: int, texts: Sequence[str], num_devices: int) -> Work:
    """Choose the prompts of the demo, and the lengths of the answers.

    The answers to the short prompts `texts` are long enough to run until the split has ended. The long prompt fits only
    the merged instance.
    """
    chat = uses_chat(tokenizer)

    def encode(text: str) -> list[int]:
        return chat_prompt(tokenizer, text) if chat else tokenizer.encode(text)

    short = [encode(text) for text in texts]
    longest = max(len(prompt) for prompt in short)
    page = EngineConfig.page_size

    def device_tokens(short_tokens: int) -> int:
        return SHORT_PER_DEVICE * -(-(longest + short_tokens) // page) * page

    steps, chunks = 0, 0
    if num_devices > 1:
        # A short request generates a token in each step. The long prompt takes a step for each of its chunks.
        steps = 2 * -(-num_layers // SEGMENT_LAYERS) + LONG_TOKENS
        share = LONG_SHARE * num_devices
        while chunks * CHUNK < share * device_tokens(MARGIN + AFTER + steps + chunks) and chunks < MAX_CHUNKS:
            chunks += 1
    short_tokens = MARGIN + AFTER + steps + chunks
    long = _fill(encode, chunks * CHUNK) if chunks else []
    return Work(short, long, short_tokens, device_tokens(short_tokens))


def run_work(llm: LLM, work: Work, texts: Sequence[str], view: DemoView, opens_page: bool = False) -> Run:
    """Send the requests to a server in this process, and show the progress in `view`.

    Args:
        opens_page: whether to serve the live page, and to open it in a browser.
    """
    degree = llm.config.max_tp
    layout = f"{llm.config.num_devices} x TP1"
    device_tokens = llm.instances[0].kv_total_pages * llm.config.page_size
    ended: list[tuple[float, TransformReport]] = []
    scheduling = SchedulingConfig(merge_to=degree, linger_s=LINGER_S)
    config = ServerConfig(port=0, metrics_port=None, http_port=0 if opens_page else None)
    with (
        local_server(llm, scheduling, config, lambda report: ended.append((time.perf_counter(), report))) as server,
        Client(server.address) as client,
    ):
        if server.page_url is not None:
            view.event(f"live page: {server.page_url}")
            webbrowser.open(server.page_url)
        view.event(f"{layout}: {len(work.short)} short requests start")
        streams = []
        for prompt, text in zip(work.short, texts, strict=True):
            streams.append(Stream(client, text, prompt, work.short_params))
            view.requests.append(streams[-1])
        for stream in streams:
            stream.wait_for(2)
        start = time.perf_counter()
        maps = [("before", llm.memory())]
        for stream in streams:
            stream.wait_for(MARGIN)
        view.event(f"a prompt of {len(work.long)} tokens arrives; one device has room for {device_tokens}: merge")
        with sampled(llm) as between:
            long = Stream(client, f"Long prompt of {len(work.long)} tokens", work.long, work.long_params)
            view.requests.append(long)
            _wait_for(llm, ended, 1, long)
        view.event(f"TP{degree}: merged in {ended[0][1].seconds:.1f} s, and computes the long prompt")
        maps += half_way(between)
        long.wait_for(1)
        view.event("the long prompt has its first token")
        maps.append((f"TP{degree}", llm.memory()))
        long_answer = long.wait()
        view.event("the long answer is complete: split")
        _wait_for(llm, ended, 2, long)
        view.event(f"{layout} again: split in {ended[1][1].seconds:.1f} s")
        maps.append(("after", llm.memory()))
        short = tuple(stream.wait() for stream in streams)
        view.event("the short answers are complete")
    (merged_at, up), (split_at, down) = ended
    marks = [
        ("before", start),
        ("merge", merged_at - up.seconds),
        ("merged", merged_at),
        ("split", split_at - down.seconds),
        ("after", split_at),
        ("end", max(stream.ended_at or 0.0 for stream in streams)),
    ]
    phases = tuple(_phase(name, start, stop, streams) for (name, start), (_, stop) in itertools.pairwise(marks))
    return Run(phases, tuple(maps), (up, down), tuple(texts), short, long_answer, device_tokens)


def _wait_for(llm: LLM, ended: list, count: int, long: Stream) -> None:
    """Wait until `ended` has `count` reports. Raises the error if the request `long` or the engine fails."""
    while len(ended) < count:
        long.check()
        _ = llm.instances
        time.sleep(0.01)


def _phase(name: str, start: float, stop: float, streams: list[Stream]) -> Phase:
    gaps = [b - a for stream in streams for a, b in itertools.pairwise(stream.times) if start <= b < stop]
    running = sum(stream.ended_at is None or stream.ended_at > stop for stream in streams)
    return Phase(name, max(stop - start, 0.0), np.array(gaps), running)


def half_way(maps: list[MemoryReport]) -> list[tuple[str, MemoryReport]]:
    """Return the memory report from the middle of a merge or split, as a list with one pair `("half way", report)`.

    `maps` has the reports of the merge or split in the order of time. During a merge or split, the KV cache of device 0
    changes its size. The returned report is the one with the size closest to the mean of the first and the last size.
    If `maps` is empty, return an empty list.
    """
    if not maps:
        return []
    sizes = [m.by_owner(0)[Owner.KV_CACHE] for m in maps]
    middle = (sizes[0] + sizes[-1]) / 2
    return [("half way", maps[min(range(len(maps)), key=lambda i: abs(sizes[i] - middle))])]


def _fill(encode: Callable[[str], list[int]], num_tokens: int) -> list[int]:
    """Return a long prompt of at most `num_tokens` tokens: many lines of notes, and a question about them."""
    things = ("two whales", "a lighthouse", "a red sail", "many gulls", "an island", "a storm far away", "calm water")
    weather = ("clear", "cloudy", "windy", "foggy", "rainy")

    def notes(days: int) -> list[int]:
        lines = [
            f"Day {day}: {weather[day % 5]}, {10 + 7 * day % 60} miles, we saw {things[day * 3 % 7]}."
            for day in range(1, days + 1)
        ]
        question = "In one sentence, what was the voyage like?"
        return encode("\n".join(["These are notes of a voyage.", *lines, question]))

    few, many = 1, num_tokens  # A day has several tokens: so many days do not fit.
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if len(notes(middle)) <= num_tokens else (few, middle)
    return notes(few)
