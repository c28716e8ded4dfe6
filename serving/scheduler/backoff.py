"""Memory of what was refused, so that it isn't asked for again at once."""

import math
from dataclasses import dataclass, field, fields

from serving.scheduler.actions import Action, Dispatch, Preempt, Reject, ScaleDown, ScaleUp, Transformation
from serving.scheduler.view import ClusterView


@dataclass(frozen=True)
class BackoffConfig:
    """How long to leave a refused action alone."""

    first_s: float = 1.0
    """After the first refusal."""
    factor: float = 2.0
    """Each further refusal of the same action multiplies the time by this."""
    longest_s: float = 60.0
    """No longer than this. A refusal that was followed by none for twice as long is forgotten."""


@dataclass
class _Refusal:
    transformation: tuple[tuple[int, ...], int] | None
    count: int
    until_s: float
    forget_s: float


@dataclass
class Backoff:
    """Refused actions, and transformations under way that may yet fail."""

    config: BackoffConfig = BackoffConfig()
    _refused: dict[tuple[object, ...], _Refusal] = field(default_factory=dict)
    _under_way: list[Transformation] = field(default_factory=list)
    _forget_at_s: float = -math.inf
    _shown: frozenset[tuple[tuple[int, ...], int]] | None = None
    """What `refused_transformations` returned last; None where a transformation was refused, or succeeded, since."""
    _shown_until_s: float = math.inf

    def blocks(self, action: Action, now_s: float) -> bool:
        """It was refused a moment ago."""
        refusal = self._refused.get(_key(action))
        return refusal is not None and now_s < refusal.until_s

    def refuse(self, action: Action, now_s: float) -> float:
        """Take note of a refusal. Returns the seconds for which the action is left alone."""
        config, known = self.config, self._refused.get(_key(action))
        count = known.count + 1 if known and now_s < known.forget_s else 1
        wait_s = min(config.first_s * config.factor ** min(count - 1, 64), config.longest_s)
        changes = (action.devices, action.degree) if isinstance(action, ScaleUp | ScaleDown) else None
        self._shown = None
        self._refused[_key(action)] = _Refusal(changes, count, now_s + wait_s, now_s + wait_s + 2 * config.longest_s)
        return wait_s

    def accept(self, action: Action) -> None:
        """Take note that an action was taken on."""
        if isinstance(action, ScaleUp | ScaleDown):
            self._under_way.append(action)
        else:
            self._refused.pop(_key(action), None)

    def ended(self, view: ClusterView) -> list[tuple[Transformation, bool]]:
        """Transformations that have ended since the last call, and whether their degree is in place."""
        ended, still = [], []
        for action in self._under_way:
            instances = view.instances_on(action.devices)
            if any(i.transition_to is not None for i in instances):
                still.append(action)
                continue
            done = bool(instances) and all(i.degree == action.degree for i in instances)
            ended.append((action, done))
            if done and self._refused.pop(_key(action), None):
                self._shown = None
        self._under_way = still
        return ended

    def refused_transformations(self, now_s: float) -> frozenset[tuple[tuple[int, ...], int]]:
        """For `ClusterView.refused`: the same object until the set changes. Now and then drops what is long past."""
        if self._shown is None or now_s >= self._shown_until_s:
            if now_s >= self._forget_at_s:
                self._refused = {key: refusal for key, refusal in self._refused.items() if now_s < refusal.forget_s}
                self._forget_at_s = now_s + self.config.longest_s
            until_s = {it.transformation: it.until_s for it in self._refused.values() if it.transformation}
            until_s = {transformation: end_s for transformation, end_s in until_s.items() if now_s < end_s}
            self._shown, self._shown_until_s = frozenset(until_s), min(until_s.values(), default=math.inf)
        return self._shown


def _key(action: Action) -> tuple[object, ...]:
    """What makes two actions the same: everything but their reasons."""
    match action:
        case ScaleUp(devices, degree) | ScaleDown(devices, degree):
            return ("transform", devices, degree)
        case Dispatch(request_id, instance_id):
            return ("dispatch", request_id, instance_id)
        case Preempt(request_id) | Reject(request_id):
            return (type(action).__name__, request_id)
        case _:
            values = [getattr(action, field.name) for field in fields(action) if field.name != "reason"]
            return (type(action).__name__, *values)
