"""Test that a server refuses damaged messages without harm.

    python benchmarks/fuzz.py [--count 100000] [--seed 0] [--json fuzz.json]

In some messages, fields exceed their limits, have the wrong type, are repeated, or are not UTF-8. Other messages are
cut or have wrong bytes. The messages go to all RPCs except `AdminService.Drain`, and some dozens of messages are in
flight at any time. After every thousand messages, a greedy test request must have the same answer as at the start.

The exit code is 1 if this answer differs, if the server ends, if a status is INTERNAL or UNKNOWN, or if the memory of
the server grows by more than 5% after the first tenth of the messages. Errors because of NaN logits do not count.
"""

import argparse
import asyncio
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from attacks import server
from attacks.pressure import OPTIONS, Call, exchange
from attacks.seeds import Rpc, rpcs
from attacks.wire import Mutator
from rich.console import Console
from rich.table import Table

from amoeba_jax import SamplingParams
from amoeba_jax.client import AsyncClient

BATCH = 1000
MAX_GROWTH = 0.05
MIN_PER_SECOND = 500
_AT_ONCE = 48
_CONNECTIONS = 4
_KNOWN_PROMPT = "Once upon a time there was"
_KNOWN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# Text of the only INTERNAL that a request may cause: its settings make logits infinite.
_NOT_NUMBERS = "not numbers"
_BUGS = ("INTERNAL", "UNKNOWN")
_FINDINGS = 50


@dataclass(frozen=True)
class Finding:
    """Message with a status that no message should cause."""

    rpc: str
    status: str
    text: str
    message: str


@dataclass
class FuzzReport:
    """Results of all messages.

    Attributes:
        statuses: number of answers by RPC and status.
        findings: first message for each INTERNAL or UNKNOWN error, by (RPC, status, beginning of the error text).
        wrong_answers: answers to the test request that differ from its first answer.
        rss_mib: memory of the server after each batch of messages; empty if it is not measured.
        warm: index in `rss_mib` of the first value after warm-up.
    """

    sent: int = 0
    seconds: float = 0.0
    statuses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    findings: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    wrong_answers: list[str] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    warm: int = 0

    @property
    def growth(self) -> float:
        """Growth of the server's memory since warm-up, as a share; NaN if the memory is not measured."""
        return self.rss_mib[-1] / self.rss_mib[self.warm] - 1 if len(self.rss_mib) > self.warm else math.nan

    @property
    def problems(self) -> list[str]:
        """Descriptions of the failed criteria. The number of messages per second is no criterion."""
        problems = [f"{it.rpc}: {it.status} {it.text!r} for {it.message}" for it in self.findings.values()]
        problems += [f"the known request: {answer}" for answer in self.wrong_answers]
        if self.growth > MAX_GROWTH:
            problems.append(f"the server has grown by {self.growth:.1%}, more than {MAX_GROWTH:.0%}")
        return problems

    def count(self, rpc: Rpc, data: bytes, status: str, text: str) -> None:
        name = rpc.path.rpartition(".")[2]
        self.statuses[name][status] += 1
        if status in _BUGS and _NOT_NUMBERS not in text and len(self.findings) < _FINDINGS:
            self.findings.setdefault((name, status, text[:60]), Finding(name, status, text[:300], data[:500].hex()))


def run_fuzz(target: str, count: int, seed: int, rss_mib: Callable[[], float] | None = None) -> FuzzReport:
    """Send `count` messages to a server and return their results; see `fuzz`."""
    return asyncio.run(fuzz(target, count, seed, rss_mib))


async def fuzz(
    target: str,
    count: int,
    seed: int,
    rss_mib: Callable[[], float] | None = None,
    on_batch: Callable[[FuzzReport], None] = lambda report: None,
) -> FuzzReport:
    """Send `count` damaged messages in batches, and return the results.

    The messages depend only on the seed and the name of the model. After each batch, the memory of the server is
    measured with `rss_mib`, `on_batch` gets the results so far, and the test request is sent. If the test request
    fails, the test ends early. At the end, merged instances are split and the default policy is restored.

    Raises `grpc.RpcError` if the server does not answer at the start.
    """
    report, began = FuzzReport(), time.monotonic()
    async with AsyncClient(target) as client:
        right = await _known_answer(client)
        kinds = rpcs((await client.model_info(timeout_s=60)).model)
        mutator = Mutator(seed)
        channels = [grpc.aio.insecure_channel(target, OPTIONS) for _ in range(_CONNECTIONS)]
        try:
            while report.sent < count:
                size = min(BATCH, count - report.sent)
                chosen = mutator.random.choices(kinds, [rpc.weight for rpc in kinds], k=size)
                await _send_batch(channels, chosen, mutator, report)
                report.seconds = time.monotonic() - began
                if rss_mib is not None:
                    report.rss_mib.append(rss_mib())
                    if report.sent <= count // 10:
                        report.warm = len(report.rss_mib) - 1
                on_batch(report)
                try:
                    answer = await _known_answer(client)
                except grpc.aio.AioRpcError as error:
                    report.wrong_answers.append(f"{error.code().name} {error.details()} after {report.sent} messages")
                    break
                if answer != right:
                    report.wrong_answers.append(f"{answer} after {report.sent} messages, not {right}")
            else:
                await _set_back(client)
        finally:
            for channel in channels:
                await channel.close()
    return report


async def _known_answer(client: AsyncClient) -> tuple[int, ...]:
    return (await client.generate(_KNOWN_PROMPT, _KNOWN, timeout_s=60))[0].token_ids


async def _send_batch(
    channels: list[grpc.aio.Channel], chosen: list[Rpc], mutator: Mutator, report: FuzzReport
) -> None:
    turns = iter(chosen)

    async def send(channel: grpc.aio.Channel) -> None:
        for rpc in turns:
            data = mutator.mutate(mutator.random.choice(rpc.seeds), rpc.request)
            report.sent += 1
            answer = await exchange(channel, Call("", rpc.path, data, rpc.timeout_s))
            report.count(rpc, data, answer.status, answer.text)

    await asyncio.gather(*(send(channels[i % len(channels)]) for i in range(_AT_ONCE)))


async def _set_back(client: AsyncClient) -> None:
    """Split merged instances, and restore the default policy if the server has a scheduler."""
    for policy in ("static", "amoeba"):
        try:
            await client.set_policy(policy, timeout_s=60)
            if policy == "static":
                while any(i.tensor_parallel_size > 1 for i in (await client.cluster(timeout_s=60)).instances):
                    await client.transform(1, timeout_s=60)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise


def show(report: FuzzReport, console: Console) -> None:
    """Print a table of statuses by RPC, and the criteria."""
    names = sorted({status for counts in report.statuses.values() for status in counts})
    table = Table("RPC", title=f"{report.sent} messages, {report.sent / report.seconds:.0f}/s")
    for name in names:
        table.add_column(name, justify="right")
    for rpc, counts in sorted(report.statuses.items()):
        table.add_row(rpc, *(str(counts[name] or "") for name in names))
    console.print(table)
    if report.rss_mib:
        first, last = report.rss_mib[report.warm], report.rss_mib[-1]
        console.print(f"server memory: {first:.0f} MiB after the first tenth, {last:.0f} MiB at the end")
    for problem in report.problems:
        console.print(f"PROBLEM: {problem}", markup=False)
    if report.sent < MIN_PER_SECOND * report.seconds:
        console.print(f"slower than {MIN_PER_SECOND} messages/s")


def plain(report: FuzzReport) -> dict[str, Any]:
    return {
        "sent": report.sent,
        "seconds": report.seconds,
        "statuses": report.statuses,
        "findings": [vars(finding) for finding in report.findings.values()],
        "wrong_answers": report.wrong_answers,
        "rss_mib": report.rss_mib,
        "problems": report.problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    server.add_options(parser)
    parser.set_defaults(max_refusals_per_second=1_000_000)  # The server refuses nearly every message.
    options = parser.parse_args()
    console = Console(width=200, highlight=False)

    def on_batch(report: FuzzReport) -> None:
        if report.sent % (10 * BATCH) == 0:
            rate, rss = report.sent / report.seconds, report.rss_mib[-1]
            console.print(f"{report.sent} messages, {rate:.0f}/s, {rss:.0f} MiB, {len(report.findings)} findings")

    with server.running_server(options) as running:
        report = asyncio.run(fuzz(running.target, options.count, options.seed, running.rss_mib, on_batch))
        alive = running.alive
    show(report, console)
    if not alive:
        console.print("PROBLEM: the server has ended")
    if options.json:
        options.json.write_text(json.dumps(plain(report), indent=2) + "\n")
    if report.problems or not alive:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
