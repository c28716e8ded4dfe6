"""Latency and failures of innocent requests while other clients attack a server.

    python benchmarks/hostile.py [--attacks errors,lists,...] [--seconds 10] [--json hostile.json]

`amoeba serve` runs a tiny model on virtual CPU devices after a warm-up. Innocent requests arrive at a steady rate from
a process and an address of their own: first alone, then beside each attack, then alone again. The attacking processes
have a low priority for the processor.

The exit code is 1 in these cases:

- An innocent request fails.
- The slowest innocent request takes at least a second, and more than ten times the median without attacks.
- The server is not idle `--recover` seconds after an attack.
- The server ends.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attacks import innocent, server
from attacks.catalogue import ATTACKS, Siege, chosen
from attacks.idle import wait_until_idle
from attacks.innocent import Figures, Innocents, figures
from attacks.pressure import Tally
from attacks.processes import ChildError
from rich.console import Console
from rich.table import Table

# Limits of the slowest innocent request: a multiple of the median without attacks, or seconds, whichever is more.
WORST_RATIO, WORST_S = 10.0, 1.0
# By then, requests with missed deadlines have ended and their pages are free.
_AFTER_DEADLINES_S = 1.0
_AGAIN = "alone again"


@dataclass
class Phase:
    """Part of the run with one attack or with no attack, and its results.

    Attributes:
        name: name of the attack, or of the phase without an attack.
        seen: figures of the innocent requests.
        rss_before_mib: resident memory of the server before the phase.
        rss_after_mib: resident memory of the server after the phase.
        idle_after_s: seconds from the end of the attack until the server was idle; None: the server was still busy at
            the limit.
        left: last known requests and pages of the server after the attack.
        tally: counts of the attack's calls; None if there was no attack.
        problems: descriptions of the failed criteria.
    """

    name: str
    seen: Figures
    rss_before_mib: float
    rss_after_mib: float = math.nan
    idle_after_s: float | None = None
    left: str = ""
    tally: Tally | None = None
    problems: list[str] = field(default_factory=list)


def judge(phase: Phase, alone: Figures) -> None:
    """Record in `phase.problems` each criterion that the phase fails. `alone`: figures without an attack."""
    seen = phase.seen
    if seen.failures:
        phase.problems.append(f"innocent requests failed: {seen.failures}")
    if not seen.count:
        phase.problems.append("no innocent request was answered")
    if seen.worst_s > WORST_RATIO * alone.median_s and seen.worst_s >= WORST_S:
        phase.problems.append(f"the slowest innocent request took {seen.worst_s:.2f} s")
    if phase.idle_after_s is None:
        phase.problems.append(f"not idle: {phase.left}")
    elif phase.name == "deadlines" and phase.idle_after_s > _AFTER_DEADLINES_S:
        phase.problems.append(f"idle {phase.idle_after_s:.1f} s after the last deadline")


def run_phase(name: str, running: server.Running, innocents: Innocents, seconds: float, recover_s: float) -> Phase:
    """Send innocent requests during the attack `name`. If `name` is no attack, send only innocent requests."""
    before, tally, problems = running.rss_mib(), None, []
    try:
        siege = Siege(running.target, name, seconds) if name in ATTACKS else None
        innocents.start()
        if siege is None:
            time.sleep(seconds)
        else:
            siege.begin()
            tally = siege.end()
    except ChildError as error:
        problems.append(str(error))
    ended_s = time.monotonic()
    try:
        answers = innocents.finish()
    except ChildError as error:
        answers = []
        problems.append(str(error))
    idle_after_s, left = wait_until_idle(running.target, ended_s, recover_s)
    return Phase(name, figures(answers), before, running.rss_mib(), idle_after_s, left, tally, problems)


def run(options: argparse.Namespace, console: Console) -> list[Phase]:
    """Run all phases, and return them. Stop early if the server is not idle after an attack, or has ended."""
    names = chosen(options.attacks)
    with (
        server.running_server(options) as running,
        Innocents(running.target, options.rate, options.innocent_address) as innocents,
    ):
        phases = []
        for name in ("warming up", "alone", *names, _AGAIN):
            phase = run_phase(name, running, innocents, options.seconds, options.recover)
            if name == "warming up":
                continue
            phases.append(phase)
            judge(phase, phases[0].seen)
            if not running.alive:
                phase.problems.append(f"the server has ended, {running.last_words()}")
            show_phase(phase, phases[0].seen, console)
            if phase.idle_after_s is None:
                console.print("  what comes after this would say nothing: it was not sent")
                break
    return phases


def show_phase(phase: Phase, alone: Figures, console: Console) -> None:
    seen = phase.seen
    ratio = seen.worst_s / alone.median_s
    console.print(
        f"[bold]{phase.name}[/]: {seen.count} innocent requests, median {1e3 * seen.median_s:.0f} ms, "
        f"worst {1e3 * seen.worst_s:.0f} ms = {ratio:.1f} x the median alone "
        f"(<= {WORST_RATIO:g} x: {yes(ratio <= WORST_RATIO)}, < {WORST_S:g} s: {yes(seen.worst_s < WORST_S)})"
    )
    if phase.tally is not None:
        tally, (length, label) = phase.tally, phase.tally.longest_text
        console.print(
            f"  sent {tally.sent} calls, {tally.bytes_sent / 2**20:.1f} MiB, in {tally.seconds:.1f} s; "
            f"answers {tally.by_status()}, longest error text {length} ({label})"
        )
    for problem in phase.problems:
        console.print(f"  PROBLEM: {problem}", markup=False)


def yes(held: bool) -> str:
    return "yes" if held else "NO"


def show_table(phases: list[Phase], console: Console) -> None:
    """Print a table with a row for each phase."""
    table = Table(title="innocent requests beside attacks; times in ms")
    for column in ("attack", "requests", "TTFT p50", "p99", "worst", "p50", "p99", "worst", "of alone"):
        table.add_column(column, justify="right" if table.columns else "left")
    for column in ("answers to the attack", "RSS, MiB", "idle after, s", "holds"):
        table.add_column(column)
    alone = phases[0].seen
    for phase in phases:
        seen = phase.seen
        times = (seen.ttft_median_s, seen.ttft_p99_s, seen.ttft_worst_s, seen.median_s, seen.p99_s, seen.worst_s)
        answers = phase.tally.by_status() if phase.tally else {}
        table.add_row(
            phase.name,
            str(seen.count),
            *(f"{1e3 * time_s:.0f}" for time_s in times),
            f"{seen.worst_s / alone.median_s:.1f}x",
            ", ".join(f"{status} {count}" for status, count in answers.items()),
            f"{phase.rss_before_mib:.0f} to {phase.rss_after_mib:.0f}",
            "never" if phase.idle_after_s is None else f"{phase.idle_after_s:.1f}",
            yes(not phase.problems),
        )
    console.print(table)


def plain(phase: Phase) -> dict[str, Any]:
    tally = phase.tally.report() if phase.tally else None
    phase.tally = None
    return asdict(phase) | {"tally": tally}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", default="", help=f"attacks, from {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each phase")
    parser.add_argument("--recover", type=float, default=60.0, help="maximum seconds until the server is idle again")
    parser.add_argument("--json", type=Path)
    innocent.add_options(parser)
    server.add_options(parser)
    options = parser.parse_args()
    chosen(options.attacks)
    console = Console(width=200, highlight=False)
    phases = run(options, console)
    show_table(phases, console)
    if options.json:
        options.json.write_text(json.dumps([plain(phase) for phase in phases], indent=2) + "\n")
    if any(phase.problems for phase in phases):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
