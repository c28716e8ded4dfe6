"""Test of a server under a mixed load for half an hour, with attacks in random order.

    python benchmarks/soak.py [--minutes 30] [--baseline-minutes 5] [--attacks errors,lists,...] [--json soak.json]

The load has short and long requests, sampled and greedy, over amoeba.v1 and the Open Inference Protocol. Some requests
are cancelled, are aborted, or miss their deadline. Clients and the policy change the degrees of instances. The innocent
requests of hostile.py run beside the load, and their latencies are measured. In the first `--baseline-minutes`, there
are no attacks.

The exit code is 0 if all of these criteria hold:

- Repeated greedy requests have equal answers.
- At the end, the server is alive, no request runs and no page is in use.
- The memory of the server grows by at most `--max-growth`.
- No innocent request fails. With attacks, the p99 of innocent requests is at most 1.5 times the p99 of the baseline.
- No status is INTERNAL or UNKNOWN.
"""

import argparse
import json
import math
import random
import statistics
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attacks import innocent, server
from attacks.catalogue import ATTACKS, Siege, chosen
from attacks.idle import wait_until_idle
from attacks.innocent import Answer, Innocents, figures
from attacks.mix import Mix, MixReport
from attacks.pressure import Tally
from attacks.processes import ChildError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MAX_P99_RATIO = 1.5
_RSS_EVERY_S = 5.0
_IDLE_WITHIN_S = 60.0
_NUM_SLOWEST = 20
_BUGS = ("INTERNAL", "UNKNOWN")


class MemoryWatch:
    """Thread that samples the memory of a server until `stop` is called.

    Attributes:
        samples: pairs (minutes since the start, resident memory in MiB).
    """

    def __init__(self, running: server.Running):
        self.samples: list[tuple[float, float]] = []
        self._began, self._running, self._stop = time.monotonic(), running, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(_RSS_EVERY_S) and self._running.alive:
            self.samples.append(((time.monotonic() - self._began) / 60, self._running.rss_mib()))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def growth(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the growth of memory after warm-up, as a share and in MiB per minute.

    Only the lowest sample of each minute counts. The first third of the minutes is warm-up. The growth is measured from
    the median of the second third to the median of the last third. If there are too few samples, both results are NaN.

    `samples`: see `MemoryWatch`.
    """
    floors: dict[int, float] = {}
    for minute, mib in samples:
        floors[int(minute)] = min(mib, floors.get(int(minute), math.inf))
    late = list(floors.values())[len(floors) // 3 :]
    middle, last = late[: len(late) // 2], late[len(late) // 2 :]
    if not middle:
        return math.nan, math.nan
    before, after = statistics.median(middle), statistics.median(last)
    return after / before - 1, (after - before) / (len(late) / 2)


@dataclass
class Soak:
    """Observations of a run.

    Attributes:
        baseline: answers to innocent requests before the first attack.
        attacked: answers to innocent requests from the first attack on.
        rss: memory of the server, as in `MemoryWatch.samples`.
        left: requests and used pages of the server after all clients have ended.
        bugs: count and first error text of each INTERNAL or UNKNOWN status.
        attacks: number of runs of each attack.
        beside: answers to innocent requests during an attack, by name of the attack.
    """

    baseline: list[Answer] = field(default_factory=list)
    attacked: list[Answer] = field(default_factory=list)
    rss: list[tuple[float, float]] = field(default_factory=list)
    mix: MixReport | None = None
    attacks: Counter[str] = field(default_factory=Counter)
    beside: dict[str, list[Answer]] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    bugs: dict[str, str] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    left: str = "the server was not asked"
    alive: bool = False
    log: str = ""

    def add(self, name: str, tally: Tally) -> None:
        """Count the answers of an attack or of the mixed load."""
        self.statuses.update(tally.by_status())
        for (label, status), count in tally.statuses.items():
            if status in _BUGS:
                text = tally.first_texts.get((label, status), "")
                self.bugs.setdefault(f"{name}, {label}: {status}", f"{count} times: {text}")


def criteria(soak: Soak, max_growth: float) -> dict[str, tuple[bool, str]]:
    """Return the criteria by name, each as (whether it holds, its figures as text).

    `max_growth`: maximum growth of the server's memory, as a share.
    """
    before, during = figures(soak.baseline), figures(soak.attacked)
    ratio, (grown, slope) = during.p99_s / before.p99_s, growth(soak.rss)
    wrong = soak.mix.wrong if soak.mix else ["the mixed load has not answered"]
    failures = Counter(before.failures) + Counter(during.failures)
    return {
        "greedy answers are the first ones": (
            not wrong,
            "; ".join(wrong) or f"all {soak.mix.checked if soak.mix else 0}",
        ),
        "nothing is left at the end": (soak.left == "nothing", soak.left),
        "memory is flat": (
            grown <= max_growth,
            f"{grown:+.1%} ({slope:+.2f} MiB/min) after warm-up, limit {max_growth:.0%}",
        ),
        "p99 of innocent requests": (
            ratio <= MAX_P99_RATIO,
            f"{1e3 * during.p99_s:.0f} ms, {ratio:.2f} x {1e3 * before.p99_s:.0f} ms, limit {MAX_P99_RATIO} x",
        ),
        "no innocent request failed": (not failures, str(dict(failures) or "none")),
        "no status INTERNAL or UNKNOWN": (not soak.bugs, "; ".join(f"{k} {v}" for k, v in soak.bugs.items()) or "none"),
        "the server is alive": (soak.alive, "yes" if soak.alive else soak.log),
    }


class Runner:
    """Run of the test, with a line of output for each minute."""

    def __init__(self, options: argparse.Namespace, running: server.Running, innocents: Innocents, console: Console):
        self._options, self._running, self._innocents, self._console = options, running, innocents, console
        self._began, self._lines = time.monotonic(), 0
        self._recent: list[Answer] = []
        self._dice = random.Random(options.seed)
        self.soak = Soak()

    @property
    def minutes(self) -> float:
        """Minutes since the start of the run."""
        return (time.monotonic() - self._began) / 60

    def baseline(self) -> None:
        """Run the load without attacks."""
        self._innocents.start()
        while self.minutes < self._options.baseline_minutes and self._running.alive:
            time.sleep(1)
            self._gather(self.soak.baseline)

    def attack(self, names: list[str]) -> None:
        """Run attacks in random order. No attack is repeated before all attacks have run."""
        queue: list[str] = []
        while self.minutes < self._options.minutes and self._running.alive:
            queue = queue or self._dice.sample(names, len(names))
            name = queue.pop()
            self.soak.attacks[name] += 1
            try:
                siege = Siege(self._running.target, name, self._dice.uniform(5, 10))
                siege.begin()
                self.soak.add(name, siege.end())
            except ChildError as error:
                self.soak.troubles.append(f"{name}: {error}")
            self._gather(self.soak.attacked, self.soak.beside.setdefault(name, []))

    def finish(self, mix: Mix) -> None:
        """End the load, and record the remaining requests and pages."""
        try:
            self.soak.attacked += self._innocents.finish()
            self.soak.mix = mix.finish()
            self.soak.add("mix", self.soak.mix.tally)
        except ChildError as error:
            self.soak.troubles.append(str(error))
        _, self.soak.left = wait_until_idle(self._running.target, time.monotonic(), _IDLE_WITHIN_S)
        self.soak.alive, self.soak.log = self._running.alive, self._running.last_words()

    def _gather(self, *lists: list[Answer]) -> None:
        """Append the new answers (of innocent requests) to each list in `lists`. Once a minute, print a line about the
        answers."""
        taken = self._innocents.take()
        for answers in (*lists, self._recent):
            answers += taken
        if int(self.minutes) > self._lines:
            self._lines = int(self.minutes)
            seen = figures(self._recent)
            self._console.print(
                f"minute {self._lines}: {seen.count} innocent requests, median {1e3 * seen.median_s:.0f} ms, p99 "
                f"{1e3 * seen.p99_s:.0f} ms, worst {1e3 * seen.worst_s:.0f} ms, failures {seen.failures}; "
                f"{self._running.rss_mib():.0f} MiB; {self.soak.attacks.total()} attacks"
            )
            self._recent = []


def run(options: argparse.Namespace, console: Console) -> Soak:
    """Run all phases, and return the observations. Stop early if the server ends."""
    with (
        server.running_server(options) as running,
        Innocents(running.target, options.rate, options.innocent_address, options.seed) as innocents,
        Mix(running.target, options.seed, options.kv_cache_tokens, options.mix_address, options.busy) as mix,
    ):
        watch, runner = MemoryWatch(running), Runner(options, running, innocents, console)
        runner.baseline()
        runner.attack(chosen(options.attacks))
        runner.finish(mix)
        watch.stop()
        runner.soak.rss = watch.samples
        return runner.soak


def slowest(soak: Soak) -> list[str]:
    """Return a line for each of the slowest innocent requests during attacks.

    The line has the seconds of the request, the UTC time when it was sent, and the attack.
    """
    named = [(answer, name) for name, answers in soak.beside.items() for answer in answers]
    named.sort(key=lambda pair: pair[0].latency_s, reverse=True)
    clock = time.time() - time.monotonic()
    return [
        f"{answer.latency_s:.2f} {time.strftime('%H:%M:%S', time.gmtime(clock + answer.sent_at_s))} {name}"
        for answer, name in named[:_NUM_SLOWEST]
    ]


def show(soak: Soak, held: dict[str, tuple[bool, str]], console: Console) -> None:
    """Print the observations and the criteria."""
    times = Table("innocent requests", title="times in ms")
    for column in ("count", "TTFT p50", "p99", "worst", "p50", "p99", "worst"):
        times.add_column(column, justify="right")
    beside = {f"beside {name}": answers for name, answers in sorted(soak.beside.items())}
    for name, answers in ({"baseline": soak.baseline, "beside attacks": soak.attacked} | beside).items():
        seen = figures(answers)
        row = (seen.ttft_median_s, seen.ttft_p99_s, seen.ttft_worst_s, seen.median_s, seen.p99_s, seen.worst_s)
        times.add_row(name, str(seen.count), *(f"{1e3 * time_s:.0f}" for time_s in row))
    console.print(times)
    console.print(f"attacks: {dict(soak.attacks)}")
    console.print("slowest innocent requests, s: " + ", ".join(slowest(soak)), markup=False)
    console.print(f"answers to them and to the mixed load: {dict(soak.statuses)}")
    for trouble in soak.troubles:
        console.print(f"trouble: {trouble}", markup=False)
    table = Table("criterion", "holds", "figures")
    for name, (holds, text) in held.items():
        table.add_row(name, "yes" if holds else "NO", escape(text))
    console.print(table)


def plain(soak: Soak, held: dict[str, tuple[bool, str]]) -> dict[str, Any]:
    return {
        "baseline": asdict(figures(soak.baseline)),
        "beside_attacks": asdict(figures(soak.attacked)),
        "rss_mib_by_minute": soak.rss,
        "rss_growth": growth(soak.rss)[0],
        "rss_slope_mib_per_min": growth(soak.rss)[1],
        "attacks": soak.attacks,
        "beside": {name: asdict(figures(answers)) for name, answers in soak.beside.items()},
        "slowest": slowest(soak),
        "statuses": soak.statuses,
        "mix": soak.mix.tally.report() if soak.mix else None,
        "troubles": soak.troubles,
        "criteria": {name: {"holds": holds, "figures": text} for name, (holds, text) in held.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes, including the baseline")
    parser.add_argument("--baseline-minutes", type=float, default=5.0, help="minutes without attacks")
    parser.add_argument("--attacks", default="", help=f"attacks, from {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--max-growth", type=float, default=0.05, help="maximum growth of memory, as a share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--busy", type=int, default=0, help="number of long answers that always run")
    parser.add_argument("--mix-address", help="source address of the mixed load; default: the address of the attackers")
    innocent.add_options(parser)
    server.add_options(parser)
    # One device holds less than the context, so that instances merge for long prompts.
    parser.set_defaults(kv_cache_tokens=1024)
    options = parser.parse_args()
    chosen(options.attacks)
    console = Console(width=180, highlight=False)
    soak = run(options, console)
    held = criteria(soak, options.max_growth)
    show(soak, held, console)
    if options.json:
        options.json.write_text(json.dumps(plain(soak, held), indent=2) + "\n")
    if not all(holds for holds, _ in held.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
