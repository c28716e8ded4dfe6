"""Scheduler: asks a policy for actions and lets an executor carry them out."""

import dataclasses
import logging
import re
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.scheduler.actions import (
    Action,
    Dispatch,
    Evict,
    LimitBatch,
    Migrate,
    Offload,
    PlacementChange,
    Preempt,
    Reject,
    RejectKind,
    Replicate,
    ScaleDown,
    ScaleUp,
    invalid,
)
from serving.scheduler.backoff import Backoff, BackoffConfig
from serving.scheduler.executor import Executor, Outcome
from serving.scheduler.pausing import resumptions, without_paused
from serving.scheduler.policy import Policy

logger = logging.getLogger("amoeba.scheduler")


PLACEMENT_KINDS = ("replicate", "evict", "migrate", "scale_out", "scale_in")
"""Names of the kinds of placement changes in counters and logs."""
MAX_RECORDS = 100
"""Number of tried actions of each kind that a scheduler keeps."""


@dataclass
class SchedulerCounters:
    """Counters of the policy's actions since the start, by kind and result."""

    ticks: int = 0
    """Number of decisions of the policy. One call of `tick` may make several decisions."""
    dispatched: int = 0
    scale_ups: int = 0
    """Number of merges that were started."""
    scale_downs: int = 0
    """Number of splits that were started."""
    transformations_failed: int = 0
    """Number of started merges, splits and placement changes that failed."""
    placement_changes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PLACEMENT_KINDS, 0))
    """Number of started placement changes, by kind."""
    batch_limits: int = 0
    offloaded: int = 0
    preempted: int = 0
    rejected: dict[RejectKind, int] = field(default_factory=lambda: dict.fromkeys(RejectKind, 0))
    refused: int = 0
    """Number of actions that the executor refused."""
    held_back: int = 0
    """Number of actions that were not tried because they were refused a short time ago."""

    def by_name(self) -> dict[str, int]:
        """Return all counters by name, for metrics and reports.

        Each kind of rejection has its own counter `rejected_<kind>`. Each kind of placement change has its own counter
        with the name of the kind.
        """
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return counts | self.placement_changes | {f"rejected_{kind.value}": n for kind, n in self.rejected.items()}


@dataclass(frozen=True)
class Decision:
    """Action of a policy, and the executor's answer."""

    action: Action
    outcome: Outcome


class Record(NamedTuple):
    """Action that the scheduler tried, as the live page shows it."""

    number: int
    """Number of the action: 1 is the first action of the scheduler."""
    at_s: float
    """Time of the decision, by the clock of the executor."""
    action: Action
    outcome: str
    """`accepted`, `refused` or `failed`."""
    detail: str
    """Reason of a refusal."""


class Scheduler:
    """Loop that asks a policy for actions and lets an executor carry them out. One thread calls all methods.

    A policy that pauses requests itself has an attribute `pauses = True`. For any other policy, the scheduler resumes
    paused requests as soon as they fit. Until then, instances with paused requests get no new requests.

    Attributes:
        policy: present policy. It may be replaced between two ticks.
        records: last tried actions other than `Dispatch`, oldest first.
        dispatch_records: last tried `Dispatch` actions, oldest first.
    """

    def __init__(self, policy: Policy, executor: Executor, backoff: BackoffConfig | None = None):
        self.policy, self.executor = policy, executor
        self.counters = SchedulerCounters()
        self.records: deque[Record] = deque(maxlen=MAX_RECORDS)
        self.dispatch_records: deque[Record] = deque(maxlen=MAX_RECORDS)
        self._num_records = 0
        self._now_s = 0.0
        self._backoff = Backoff(backoff or BackoffConfig())

    def tick(self) -> list[Decision]:
        """Ask the policy for actions, and execute them. Return the actions that were tried.

        Call this after every change, for example when a request arrives, or when a request, merge or split ends. Also
        call it at least once a second, for deadlines and for merged instances that wait before they split
        (`SplitConfig.linger_s`).
        """
        decisions, again = self._decide()
        while again:  # an instance in transformation accepts only one request for each decision
            more, again = self._decide()
            decisions += more
        return decisions

    def _decide(self) -> tuple[list[Decision], bool]:
        """Ask the policy once, and execute its actions. Return `(tried actions, ask again)`.

        `ask again` is True if an instance that is merging or splitting has accepted a request. The instance accepts
        only one request in each decision, so the next decision may dispatch another request to it.
        """
        self.counters.ticks += 1
        view = self.executor.snapshot()
        self._now_s = view.now_s
        for action, done in self._backoff.ended(view):
            if not done:
                self.counters.transformations_failed += 1
                self._log(action, "failed", logging.WARNING, retry_s=self._backoff.refuse(action, view.now_s))
        refused = view.refused | self._backoff.refused_transformations(view.now_s)
        changes = self._backoff.refused_changes(view.now_s)
        if refused != view.refused or changes:
            view = dataclasses.replace(view, refused=refused, refused_changes=changes)
        actions: list[Action] = []
        has_paused = bool([i for i in view.instances if i.paused_degree is not None])
        if has_paused and not getattr(self.policy, "pauses", False):
            actions += resumptions(view)
            view = without_paused(view)
        decisions = []
        for action in [*actions, *self.policy.decide(view)]:
            if (problem := invalid(action)) is not None:
                self.counters.refused += 1
                logger.error("policy=%s returned an invalid action: %s", self.policy.name, problem)
                continue
            if self._backoff.blocks(action, view.now_s):
                self.counters.held_back += 1
                continue
            outcome = self.executor.apply(action)
            decisions.append(Decision(action, outcome))
            if outcome.accepted:
                self._backoff.accept(action)
                self._count(action)
                self._log(action, "accepted")
            else:
                self.counters.refused += 1
                retry_s = self._backoff.refuse(action, view.now_s)
                level = logging.INFO if outcome.soon else logging.WARNING
                self._log(action, "refused", level, detail=outcome.detail, retry_s=retry_s)
        dispatched = {d.action.instance_id for d in decisions if isinstance(d.action, Dispatch) and d.outcome.accepted}
        joined = [i for i in view.instances if i.transition_to is not None and i.id in dispatched]
        return decisions, bool(joined)

    def _count(self, action: Action) -> None:
        counters = self.counters
        match action:
            case Dispatch():
                counters.dispatched += 1
            case ScaleUp():
                counters.scale_ups += 1
            case ScaleDown():
                counters.scale_downs += 1
            case Preempt():
                counters.preempted += 1
            case Offload():
                counters.offloaded += 1
            case LimitBatch():
                counters.batch_limits += 1
            case Reject(kind=kind):
                counters.rejected[kind] += 1
            case _ if isinstance(action, PlacementChange):
                counters.placement_changes[_snake_case(type(action).__name__)] += 1

    def _log(self, action: Action, outcome: str, level: int = logging.INFO, **more: str | float) -> None:
        """Log an action as one line of `key=value` pairs, and keep it in `records`.

        The attribute `decision` of the log record has the pairs as a dict.
        """
        self._num_records += 1
        detail = str(more.get("detail", ""))
        records = self.dispatch_records if isinstance(action, Dispatch) else self.records
        records.append(Record(self._num_records, self._now_s, action, outcome, detail))
        if not logger.isEnabledFor(level):
            return
        record = {"action": _snake_case(type(action).__name__), "policy": self.policy.name}
        record |= dataclasses.asdict(action) | {"outcome": outcome} | more
        if isinstance(action, Replicate | Evict | Migrate):
            record["layers"] = f"{action.layers[0]}-{action.layers[1] - 1}"
        logger.log(level, " ".join(f"{k}={_quoted(v)}" for k, v in record.items()), extra={"decision": record})


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _quoted(value: object) -> str:
    """Format a value for the log: simple text unchanged, devices as `0-3`, other text in quotes."""
    if isinstance(value, tuple):
        return f"{value[0]}-{value[-1]}" if value else "none"
    text = str(value)
    if text and re.fullmatch(r"[\w.:+-]+", text):
        return text
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
