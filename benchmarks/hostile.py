"""What innocent clients see of a server while others attack it.

    python benchmarks/hostile.py [--attacks errors,lists,...] [--seconds 10] [--json hostile.json]

`amoeba serve` over a tiny model, warmed up, on virtual CPU devices. Innocent requests come at a steady rate from a
process and an address of their own: alone first, then beside each attack, whose process leaves the cores to the server,
then alone again. The exit code is 1 if an innocent request failed, or the slowest took more than ten times the median
alone and also a second or more; if the server was not idle within `--recover` seconds of an attack; or if it ended.
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

# The slowest innocent request may take this many times the median alone, or this long.
WORST_RATIO, WORST_S = 10.0, 1.0
# Requests whose deadlines are over are gone by then, and their pages free.
_AFTER_DEADLINES_S = 1.0
_AGAIN = "alone again"


@dataclass
class Phase:
    """An attack, or a time without one, and what became of it."""

    name: str
    seen: Figures
    rss_before_mib: float
    rss_after_mib: float = math.nan
    idle_after_s: float | None = None
    left: str = ""
    tally: Tally | None = None
    problems: list[str] = field(default_factory=list)


def judge(phase: Phase, alone: Figures) -> None:
    """Add to the problems of a phase what its innocent requests suffered."""
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
    """Send innocent requests beside an attack, or alone where `name` is not one."""
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
    """All phases, alone first; ends early where the server has ended or is not idle after an attack."""
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
    """Lines about one phase, as it ends."""
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
    """A criterion in words."""
    return "yes" if held else "NO"


def show_table(phases: list[Phase], console: Console) -> None:
    """All phases, a row each."""
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
    """A phase for JSON."""
    tally = phase.tally.report() if phase.tally else None
    phase.tally = None
    return asdict(phase) | {"tally": tally}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", default="", help=f"of {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument("--recover", type=float, default=60.0, help="seconds until the server must be idle again")
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
