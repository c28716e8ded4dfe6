"""Time of one scheduling decision with a long queue. The benchmark needs no devices.

    python benchmarks/fleet.py [--instances 8] [--waiting 1000] [--policies amoeba] [--ticks 300]

At the start, all instances are full. Of every 16 devices, the first four form a TP4 instance with a long request. All
other instances are TP1. One in 20 waiting requests is too long for one device. Between two decisions, one request
arrives. The cases are

- full: no waiting request fits on an instance.
- flow: between two decisions, a request also ends, so that another request fits.
- urgent: the new request may preempt all running requests.
- change: between two decisions, four TP1 instances also merge, or a TP4 instance splits.
"""

import argparse
import gc
import itertools
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

from rich.console import Console
from rich.table import Table

from serving.scheduler import (
    POLICY_NAMES,
    Action,
    ClusterView,
    DegreeLimits,
    Dispatch,
    InstanceView,
    Outcome,
    Preempt,
    Reject,
    RunningRequest,
    Scheduler,
    Timing,
    WaitingRequest,
    make_policy,
)

SLOTS, SHORT, LONG = 32, 1_000, 50_000
DEGREES = (DegreeLimits(1, SLOTS * SHORT, SLOTS), DegreeLimits(2, 80_000, 64), DegreeLimits(4, 180_000, 128))
TIMING = Timing({1: 0.03, 4: 0.02}, {1: 4_000.0, 4: 10_000.0}, {(1, 4): 1.0})
CASES = ("full", "flow", "urgent", "change")


@dataclass(frozen=True)
class Figures:
    """Milliseconds of a scheduler's tick, and of the policy's decision within a tick."""

    policy: str
    case: str
    tick_p50_ms: float
    tick_p99_ms: float
    decide_p50_ms: float
    dispatched: int


class Fleet:
    """Instances without devices. A scheduler can dispatch requests to them, but not merge or split them."""

    def __init__(self, instances: int, waiting: int):
        self.now_s, self._numbers, self.queue = 1_000.0, iter(range(10**9)), {}
        self.views: list[InstanceView] = []
        device = 0
        while device < instances:
            degree = 4 if device % 16 == 0 and device + 4 <= instances else 1
            self.views.append(self._full(device, degree))
            device += degree
        self.num_devices = device
        self._find_places()
        for _ in range(waiting):
            self.arrive()

    def _find_places(self) -> None:
        self._place = {view.id: place for place, view in enumerate(self.views)}

    def _full(self, first: int, degree: int) -> InstanceView:
        size = LONG if degree > 1 else 0
        running = [RunningRequest(f"long-{first}", size - 400, size, arrival_s=0.0)] if size else []
        running += [self._running() for _ in range(SLOTS * degree - len(running))]
        capacity = DEGREES[degree // 2].capacity_tokens
        free = capacity - sum(-(-request.num_tokens // 16) * 16 for request in running)
        return InstanceView(first, tuple(range(first, first + degree)), capacity, free, 0, tuple(running), step_s=0.02)

    def _running(self) -> RunningRequest:
        number = next(self._numbers)
        return RunningRequest(f"r{number}", SHORT - 100, SHORT, priority=1, arrival_s=900.0 + number % 100)

    def arrive(self, priority: int = 1) -> None:
        """Add a request; one in 20 is long."""
        number = next(self._numbers)
        total = LONG if number % 20 == 0 else SHORT
        self.queue[f"w{number}"] = WaitingRequest(f"w{number}", total - 200, total, priority, arrival_s=self.now_s)

    def step(self, changed: Iterator[int], count: int, ends: bool) -> None:
        """Simulate 20 ms in which one request on each of the next `count` instances gets a token.

        With `ends`, a request on the first of these instances ends instead, if that instance is full.

        `changed`: iterator that yields the indexes of the next instances in `views`.
        """
        self.now_s += 0.02
        for index in range(count):
            place = next(changed)
            view = self.views[place]
            if ends and index == 0 and not view.free_slots:
                self.views[place] = replace(
                    view, running=view.running[:-1], free_slots=1, free_tokens=view.free_tokens + SHORT
                )
            else:
                grown = replace(view.running[-1], num_tokens=view.running[-1].num_tokens % SHORT + 1)
                self.views[place] = replace(view, running=(*view.running[:-1], grown))

    def change(self, place: int) -> None:
        """Merge four TP1 instances into a TP4 instance, or split a TP4 instance into four. The new instances are full.

        The four devices are the aligned group that includes the instance `views[place]`.
        """
        first = self.views[place].devices[0] // 4 * 4
        here = [view for view in self.views if first <= view.id < first + 4]
        new = [self._full(first, 4)] if len(here) > 1 else [self._full(device, 1) for device in range(first, first + 4)]
        start = self.views.index(here[0])
        self.views[start : start + len(here)] = new
        self._find_places()

    def snapshot(self) -> ClusterView:
        return ClusterView(
            self.now_s, tuple(self.views), tuple(self.queue.values()), DEGREES, self.num_devices, timing=TIMING
        )

    def apply(self, action: Action) -> Outcome:
        match action:
            case Dispatch(request_id, instance_id):
                del self.queue[request_id]
                place = self._place[instance_id]
                view = self.views[place]
                self.views[place] = replace(
                    view, running=(*view.running, self._running()), free_slots=0, free_tokens=view.free_tokens - SHORT
                )
                return Outcome(True)
            case Reject(request_id):
                del self.queue[request_id]
                return Outcome(True)
            case Preempt():
                return Outcome(True)
            case _:
                return Outcome(False, "instances do not change here")


def measure(name: str, case: str, options: argparse.Namespace) -> Figures:
    """Time `options.ticks` decisions, after the same number of warm-up decisions."""
    fleet = Fleet(options.instances, options.waiting)
    policy = make_policy(name)
    scheduler = Scheduler(policy, fleet)
    decide, decide_ms = policy.decide, []

    def timed(view: ClusterView) -> list[Action]:
        start = time.perf_counter()
        actions = decide(view)
        decide_ms.append(1e3 * (time.perf_counter() - start))
        return actions

    policy.decide = timed  # type: ignore[method-assign]
    changed = (place % len(fleet.views) for place in itertools.count())
    tick_ms = []
    for _ in range(2 * options.ticks):
        fleet.step(changed, options.changed, ends=case == "flow")
        if case == "change":
            fleet.change(next(changed))
        fleet.arrive(priority=-1 if case == "urgent" else 1)
        start = time.perf_counter()
        scheduler.tick()
        tick_ms.append(1e3 * (time.perf_counter() - start))
    tick_ms, decide_ms = tick_ms[options.ticks :], decide_ms[options.ticks :]
    return Figures(
        name, case, median(tick_ms), quantiles(tick_ms, n=100)[98], median(decide_ms), scheduler.counters.dispatched
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=8, help="number of devices")
    parser.add_argument("--waiting", type=int, default=1_000)
    parser.add_argument("--changed", type=int, default=8, help="instances that change between two decisions")
    parser.add_argument("--ticks", type=int, default=300)
    parser.add_argument("--policies", nargs="+", default=list(POLICY_NAMES))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # Each dispatch would write a line to the log.
    gc.freeze()
    title = f"{options.instances} devices, {options.waiting} requests wait, {options.changed} views change; ms"
    table = Table("policy", "case", "tick p50", "tick p99", "decide p50", "dispatched", title=title)
    results = []
    for name in options.policies:
        for case in options.cases:
            found = measure(name, case, options)
            results.append(vars(found))
            times = (found.tick_p50_ms, found.tick_p99_ms, found.decide_p50_ms)
            table.add_row(name, case, *(f"{value:.3f}" for value in times), str(found.dispatched))
    Console(width=100).print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
