"""Innocent requests: short prompts of a client that does not attack, at a steady rate, from their own process and
address."""

import argparse
import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import grpc

from amoeba_jax.client import AsyncClient
from amoeba_jax.client.connection import Retries
from amoeba_jax.sampling_params import SamplingParams
from attacks.forwarder import forwarded
from attacks.processes import Child

# An answer takes some tens of milliseconds, so this wait is a denial of service.
TIMEOUT_S = 60.0
_MAX_IN_FLIGHT = 256
_WORDS = "Once upon a time there was little girl and her dog who went to the park with mom see big red ball"


@dataclass(frozen=True)
class Answer:
    """Result of one request.

    Attributes:
        ttft_s: seconds until the first token; None if no token arrived.
        status: name of the gRPC status.
        sent_at_s: time of sending, by `time.monotonic()`.
    """

    ttft_s: float | None
    latency_s: float
    status: str
    sent_at_s: float


@dataclass(frozen=True)
class Figures:
    """Percentiles over innocent requests, in seconds.

    `median_s`, `p99_s` and `worst_s` are latencies of whole requests, including failed requests. `failures` is the
    number of failed requests by gRPC status.
    """

    count: int
    failures: dict[str, int]
    ttft_median_s: float
    ttft_p99_s: float
    ttft_worst_s: float
    median_s: float
    p99_s: float
    worst_s: float


def figures(answers: Sequence[Answer]) -> Figures:
    """Return percentiles and failures of answers. Percentiles are NaN if there are no answers."""
    latencies = sorted(answer.latency_s for answer in answers)
    ttfts = sorted(answer.ttft_s for answer in answers if answer.ttft_s is not None)
    failures = Counter(answer.status for answer in answers if answer.status != "OK")
    return Figures(
        len(answers),
        dict(failures),
        *(quantile(ttfts, share) for share in (0.5, 0.99, 1)),
        *(quantile(latencies, share) for share in (0.5, 0.99, 1)),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile `share` (0 to 1) of sorted values; NaN if there are no values."""
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


class Innocents:
    """Load of innocent requests in another process, which this object controls."""

    def __init__(self, target: str, rate: float, source: str | None, seed: int = 0):
        self._child = Child(_main, target, rate, source, seed)
        self._child.receive(120)

    def start(self) -> None:
        self._child.send("start")

    def take(self) -> list[Answer]:
        """Return the answers that arrived since the last call. The load continues."""
        self._child.send("take")
        return self._child.receive(30)

    def finish(self) -> list[Answer]:
        """Stop sending, wait for all open requests, and return the answers since the last call of `take`."""
        self._child.send("finish")
        return self._child.receive(TIMEOUT_S + 30)

    def close(self) -> None:
        self._child.close()

    def __enter__(self) -> "Innocents":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=5.0, help="innocent requests per second")
    parser.add_argument(
        "--innocent-address",
        default="127.0.0.2",
        help='source address of innocent requests, because limits are by address; "": the address of the attackers',
    )


def _main(pipe: Connection, target: str, rate: float, source: str | None, seed: int) -> None:
    asyncio.run(_Load(pipe, rate, seed).run(target, source))


class _Load:
    def __init__(self, pipe: Connection, rate: float, seed: int):
        self._pipe, self._rate = pipe, rate
        self._random = random.Random(seed)
        self._answers: list[Answer] = []
        self._in_flight: set[asyncio.Task[None]] = set()

    async def run(self, target: str, source: str | None) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if source:
                target = await stack.enter_async_context(forwarded(target, source))
            client = await stack.enter_async_context(AsyncClient(target, retries=Retries(attempts=1)))
            await client.model_info(timeout_s=TIMEOUT_S)
            self._pipe.send("ready")
            sending, due = False, 0.0
            while True:
                while self._pipe.poll():
                    match self._pipe.recv():
                        case "start":
                            sending, due = True, time.monotonic()
                        case "take":
                            self._hand_over()
                        case "finish":
                            sending = False
                            if self._in_flight:
                                await asyncio.wait(self._in_flight)
                            self._hand_over()
                # This limits the open requests to a server that hangs.
                while sending and time.monotonic() >= due:
                    due += 1 / self._rate
                    if len(self._in_flight) < _MAX_IN_FLIGHT:
                        task = asyncio.ensure_future(self._ask(client))
                        self._in_flight.add(task)
                        task.add_done_callback(self._in_flight.discard)
                await asyncio.sleep(0.01)

    def _hand_over(self) -> None:
        self._pipe.send(self._answers)
        self._answers = []

    async def _ask(self, client: AsyncClient) -> None:
        prompt = " ".join(self._random.choices(_WORDS.split(), k=self._random.randint(5, 9)))
        greedy = self._random.random() < 0.5
        params = SamplingParams(
            temperature=0 if greedy else 1,
            seed=None if greedy else self._random.getrandbits(32),
            max_tokens=self._random.randint(8, 16),
            ignore_eos=True,
        )
        start, first, status = time.monotonic(), None, "OK"
        try:
            async for _ in client.stream(prompt, params, timeout_s=TIMEOUT_S):
                first = first or time.monotonic()
        except grpc.aio.AioRpcError as error:
            status = error.code().name
        ttft_s = None if first is None else first - start
        self._answers.append(Answer(ttft_s, time.monotonic() - start, status, start))
