"""Memory of refused actions, so that they are not requested again immediately."""

from dataclasses import dataclass, field, fields

from serving.scheduler.actions import Action, Dispatch, Preempt, Reject, ScaleDown, ScaleUp, Transformation
from serving.scheduler.view import ClusterView


@dataclass(frozen=True)
class BackoffConfig:
    """Times for which a refused action is blocked."""

    first_s: float = 1.0
    """Seconds after the first refusal."""
    factor: float = 2.0
    """Factor by which each further refusal of the same action increases the time."""
    longest_s: float = 60.0
    """Maximum time in seconds. When a block has ended, its refusals are remembered for twice this time."""


@dataclass
class _Refusal:
    transformation: tuple[tuple[int, ...], int] | None
    count: int
    until_s: float
    forget_s: float


@dataclass
class Backoff:
    """Refused actions, and accepted transformations that may still fail."""

    config: BackoffConfig = BackoffConfig()
    _refused: dict[tuple[object, ...], _Refusal] = field(default_factory=dict)
    _under_way: list[Transformation] = field(default_factory=list)

    def blocks(self, action: Action, now_s: float) -> bool:
        """Return whether an action was refused too recently to be tried again."""
        refusal = self._refused.get(_key(action))
        return refusal is not None and now_s < refusal.until_s

    def refuse(self, action: Action, now_s: float) -> float:
        """Record a refusal and return the seconds for which the action is blocked."""
        config, known = self.config, self._refused.get(_key(action))
        count = known.count + 1 if known and now_s < known.forget_s else 1
        wait_s = min(config.first_s * config.factor ** min(count - 1, 64), config.longest_s)
        changes = (action.devices, action.degree) if isinstance(action, ScaleUp | ScaleDown) else None
        self._refused[_key(action)] = _Refusal(changes, count, now_s + wait_s, now_s + wait_s + 2 * config.longest_s)
        return wait_s

    def accept(self, action: Action) -> None:
        """Record that an action was accepted, and forget its refusals. Refusals of a transformation are forgotten when
        it has reached its degree."""
        if isinstance(action, ScaleUp | ScaleDown):
            self._under_way.append(action)
        else:
            self._refused.pop(_key(action), None)

    def ended(self, view: ClusterView) -> list[tuple[Transformation, bool]]:
        """Return `(transformation, reached)` for each transformation that has ended since the last call. `reached` is
        true if all instances on its devices have its degree."""
        ended, still = [], []
        for action in self._under_way:
            instances = view.instances_on(action.devices)
            if any(i.transition_to is not None for i in instances):
                still.append(action)
                continue
            done = bool(instances) and all(i.degree == action.degree for i in instances)
            ended.append((action, done))
            if done:
                self._refused.pop(_key(action), None)
        self._under_way = still
        return ended

    def refused_transformations(self, now_s: float) -> frozenset[tuple[tuple[int, ...], int]]:
        """Return the blocked transformations as (devices, degree), for `ClusterView.refused`."""
        self._refused = {key: refusal for key, refusal in self._refused.items() if now_s < refusal.forget_s}
        return frozenset(r.transformation for r in self._refused.values() if r.transformation and now_s < r.until_s)


def _key(action: Action) -> tuple[object, ...]:
    """Return the identity of an action, without its reason and options. A merge and a split with the same devices and
    degree have the same identity."""
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
