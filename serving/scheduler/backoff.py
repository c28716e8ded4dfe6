"""Record of actions that the executor refused, so that a policy does not request them again immediately."""

from dataclasses import dataclass, field

from serving.scheduler.actions import (
    Action,
    Evict,
    PlacementChange,
    ScaleDown,
    ScaleIn,
    ScaleOut,
    ScaleUp,
    Transformation,
    identity,
)
from serving.scheduler.view import ClusterView


@dataclass(frozen=True)
class BackoffConfig:
    """Seconds for which a refused action is blocked. Each further refusal multiplies the time by `factor`."""

    first_s: float = 1.0
    """Time after the first refusal, in seconds."""
    factor: float = 2.0
    """Factor by which each further refusal of the same action lengthens the time."""
    longest_s: float = 60.0
    """Maximum time in seconds. After a block has ended, its refusals are remembered for twice this time."""


@dataclass
class _Refusal:
    action: Action
    count: int
    until_s: float
    forget_s: float


@dataclass
class Backoff:
    """Record of refused actions, which are blocked for some seconds.

    The record also has the merges, splits and placement changes in progress. If one of these actions fails, the
    scheduler records the action as refused.
    """

    config: BackoffConfig = BackoffConfig()
    _refused: dict[tuple[object, ...], _Refusal] = field(default_factory=dict)
    _under_way: list[Transformation | PlacementChange] = field(default_factory=list)

    def blocks(self, action: Action, now_s: float) -> bool:
        """Return whether an action is blocked because it was refused a short time ago."""
        if not self._refused:
            return False
        refusal = self._refused.get(identity(action))
        return refusal is not None and now_s < refusal.until_s

    def refuse(self, action: Action, now_s: float) -> float:
        """Record that an action was refused. Return the seconds for which it is blocked."""
        config, known = self.config, self._refused.get(identity(action))
        count = known.count + 1 if known and now_s < known.forget_s else 1
        wait_s = min(config.first_s * config.factor ** min(count - 1, 64), config.longest_s)
        self._refused[identity(action)] = _Refusal(action, count, now_s + wait_s, now_s + wait_s + 2 * config.longest_s)
        return wait_s

    def accept(self, action: Action) -> None:
        """Record that an action was accepted.

        The earlier refusals of the action are forgotten when it has succeeded. Merges, splits and placement changes
        succeed later (`ended`). All other actions succeed at once.
        """
        if isinstance(action, Transformation | PlacementChange):
            self._under_way.append(action)
        elif self._refused:
            self._refused.pop(identity(action), None)

    def ended(self, view: ClusterView) -> list[tuple[Transformation | PlacementChange, bool]]:
        """Return `(action, succeeded)` for each merge, split and placement change that has ended since the last call.

        A merge or split has succeeded if all instances on its devices have the requested degree. A placement change has
        succeeded if the snapshot shows its result, such as layers on their new device.
        """
        if not self._under_way:
            return []
        ended, still = [], []
        for action in self._under_way:
            if isinstance(action, ScaleUp | ScaleDown):
                instances = view.instances_on(action.devices)
                running = any(i.transition_to is not None for i in instances)
                done = bool(instances) and all(i.degree == action.degree for i in instances)
            else:
                instance = view.instance(action.instance_id)
                running = instance is not None and instance.changes_placement
                done = _is_placed(view, action)
            if running:
                still.append(action)
                continue
            ended.append((action, done))
            if done:
                self._refused.pop(identity(action), None)
        self._under_way = still
        return ended

    def refused_transformations(self, now_s: float) -> frozenset[tuple[tuple[int, ...], int]]:
        """Return `(devices, degree)` of each merge and split that is blocked now, for `ClusterView.refused`."""
        if not self._refused:
            return frozenset()
        self._refused = {key: refusal for key, refusal in self._refused.items() if now_s < refusal.forget_s}
        blocked = (r.action for r in self._refused.values() if now_s < r.until_s)
        return frozenset((a.devices, a.degree) for a in blocked if isinstance(a, ScaleUp | ScaleDown))

    def refused_changes(self, now_s: float) -> frozenset[tuple[object, ...]]:
        """Return the identities (`actions.identity`) of placement changes that are blocked now.

        The result is for `ClusterView.refused_changes`.
        """
        if not self._refused:
            return frozenset()
        blocked = (r.action for r in self._refused.values() if now_s < r.until_s)
        return frozenset(identity(action) for action in blocked if isinstance(action, PlacementChange))


def _is_placed(view: ClusterView, action: PlacementChange) -> bool:
    if isinstance(action, ScaleOut | ScaleIn):
        return (view.instance(action.device) is not None) == isinstance(action, ScaleOut)
    instance = view.instance(action.instance_id)
    if instance is None:
        return False
    homes = [home for layer in range(*action.layers) for home in instance.homes(layer, action.modules)]
    if isinstance(action, Evict):
        return all(action.device not in home for home in homes)
    return all(action.device in home for home in homes)
