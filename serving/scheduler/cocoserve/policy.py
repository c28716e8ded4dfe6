"""CoCoServe's policy: replicates and migrates layers. Another policy decides where requests run."""

import itertools
import math
from collections.abc import Collection, Iterator

from serving.scheduler.actions import (
    Action,
    Evict,
    LimitBatch,
    Migrate,
    Modules,
    PlacementChange,
    Replicate,
    ScaleIn,
    ScaleOut,
    ScaleUp,
    identity,
)
from serving.scheduler.admission import Admission
from serving.scheduler.amoeba import AmoebaPolicy
from serving.scheduler.amoeba_config import AmoebaConfig
from serving.scheduler.cocoserve.algorithms import (
    can_host,
    holds_weights,
    layer_homes,
    max_replicas,
    replica_runs,
    scale_down,
    scale_up,
)
from serving.scheduler.cocoserve.config import CocoServeConfig
from serving.scheduler.cocoserve.monitor import Monitor
from serving.scheduler.cocoserve.speedup import Homes
from serving.scheduler.flying import FlyingPolicy
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.view import ClusterView, InstanceView

_INTERVAL_S = 1.0
"""Minimum seconds between two evaluations of the averages."""
_CALM = 0.7
"""Limit for the load, as a share of the load at the latest change because of SLO violations.

Below the limit, layers may be replicated again. Without it, a constant load could cause reductions and growth in turn.
"""
_HELPED = 0.98
"""Ratio of the step durations after and before a reduction of the batch, below which the reduction has helped."""


class CocoServePolicy:
    """Policy `cocoserve`: replicates layers on vacant devices, and relieves instances that violate their SLOs.

    Another policy, `amoeba` or `flying`, dispatches requests, and merges and splits instances. In addition, this policy
    changes placements, one change at a time. If SLOs are met, it replicates layers on vacant devices (Algorithm 1). If
    SLOs are violated, it reduces the work of an instance (Algorithm 2). Before a merge, it returns the layers of each
    merging instance to the instance's own devices. docs/scheduling.md has the details.

    If the executor refuses placement changes (`ClusterView.layer` is None), only the other policy acts.

    Args:
        amoeba: settings of `amoeba`. Its latency limits are the SLOs.
        flying: settings of `flying`.

    Attributes:
        monitor: averages on which the decisions are based.
        pauses: whether the other policy is `flying`, which pauses and resumes requests.
    """

    name = "cocoserve"

    def __init__(
        self,
        config: CocoServeConfig | None = None,
        amoeba: AmoebaConfig | None = None,
        admission: Admission | None = None,
        flying: FlyingConfig | None = None,
    ):
        self.config = config or CocoServeConfig()
        self.pauses = self.config.request_policy == "flying"
        self._requests = FlyingPolicy(flying, admission) if self.pauses else AmoebaPolicy(amoeba, admission)
        self.monitor = Monitor(self.config, amoeba or AmoebaConfig())
        self._changed_s = self._checked_s = -math.inf
        self._latest: list[Action] = []
        """Latest change that the controller requested."""
        self._violated_at_load: float | None = None
        """Load at the latest change because of SLO violations. None after the load has fallen far enough."""
        self._limited_step_s: dict[int, float] = {}
        """Seconds of a decode step before the latest reduction of the batch, by instance id.

        A further reduction needs shorter steps. Otherwise, an SLO that is too strict would reduce batches for nothing.
        """
        self._scaled_out: set[int] = set()
        """Devices of instances that this policy has started. It may end them."""

    def decide(self, view: ClusterView) -> list[Action]:
        """Return the next actions, in the order of their execution (`Policy.decide`)."""
        actions = self._requests.decide(view)
        if view.layer is None:
            return actions
        self.monitor.update(view)
        merging = {device for a in actions if isinstance(a, ScaleUp) for device in a.devices}
        actions = [kept for action in actions for kept in self._prepared(view, action)]
        if self._may_change(view):
            changes = self._reduce(view, merging) if self.monitor.violated else self._grow(view, merging)
            if changes:
                self._changed_s, self._latest = view.now_s, changes
                self._violated_at_load = self.monitor.load if self.monitor.violated else self._violated_at_load
                self._scaled_out |= {a.device for a in changes if isinstance(a, ScaleOut)}
            actions += changes
        return actions

    # Merges

    def _prepared(self, view: ClusterView, action: Action) -> list[Action]:
        """Return an action of the other policy, or the placement changes that must precede the action.

        Only a merge needs placement changes: each merging instance must have all its layers on its own devices, and
        these devices must have no layers of other instances. During a placement change of any of these instances, the
        list is empty. If the needed changes were refused, return the merge itself. The executor then refuses the merge
        and gives the reason.
        """
        if not isinstance(action, ScaleUp):
            return [action]
        members = view.instances_on(action.devices)
        involved = {i.id: i for i in members if i.placement}
        involved |= {guest.id: guest for device in action.devices for guest in view.guests(device)}
        if any(i.changes_placement for i in (*members, *involved.values())):
            return []
        why = f"before devices {action.devices[0]}-{action.devices[-1]} merge: {action.reason}"
        undone: list[Action] = []
        for instance in involved.values():
            only = None if instance in members else set(action.devices)
            change = next(
                (c for c in _undo(view, instance, only, why) if identity(c) not in view.refused_changes), None
            )
            if change is not None:
                undone.append(change)
        return undone or [action]

    # Controller

    def _may_change(self, view: ClusterView) -> bool:
        now_s = view.now_s
        if any(identity(change) in view.refused_changes for change in self._latest):
            self._changed_s = -math.inf  # It had no effect to wait for.
        if any(i.changes_placement or i.transition_to is not None for i in view.instances):
            return False
        if now_s - self._changed_s < self.config.cool_down_s or now_s - self._checked_s < _INTERVAL_S:
            return False
        self._checked_s = now_s
        return True

    def _reduce(self, view: ClusterView, merging: set[int]) -> list[Action]:
        """Return the next actions while SLOs are violated (Algorithm 2).

        If layers can be replicated on an empty device, replicate them there. If not, reduce the work of the instance
        with the largest share of violations.
        """
        empty = [d.id for d in view.devices if _is_empty(view, d.id)]
        if growth := self._growth(view, merging, empty):
            return growth
        worst = sorted(
            view.instances,
            key=lambda i: (-self.monitor.late_running(view, i) / max(len(i.running), 1), -i.load, i.id),
        )
        for instance in worst:
            if not merging.isdisjoint(instance.devices):
                continue
            step_s = instance.step_s or 0.0
            helps = step_s < _HELPED * self._limited_step_s.get(instance.id, math.inf)
            reductions = scale_down(view, instance, self.config, self.monitor.is_slow(instance) and helps, lambda: True)
            if (reduction := next(reductions, None)) is not None:
                if isinstance(reduction[0], LimitBatch):
                    self._limited_step_s[instance.id] = step_s
                return [*reduction]
        return []

    def _grow(self, view: ClusterView, merging: set[int]) -> list[Action]:
        """Return the next actions while SLOs are met.

        If the load is still close to the load at the latest violation, the list is empty. If the load is lower, the
        actions raise the limits of batches. If no batch is limited, they replicate layers (`_growth`). If that is
        impossible, they end an instance (`_scale_in`).
        """
        if self._violated_at_load is not None and self.monitor.load > _CALM * self._violated_at_load:
            return []
        self._violated_at_load = None
        self._limited_step_s.clear()
        if limited := [i for i in view.instances if i.batch_limit is not None]:
            return [self._raised(view, instance) for instance in limited]
        vacant = [d for d, vacancy in self.monitor.vacancy.items() if vacancy >= self.config.vacancy_threshold]
        return self._growth(view, merging, vacant) or self._scale_in(view, merging)

    def _raised(self, view: ClusterView, instance: InstanceView) -> LimitBatch:
        size = (instance.batch_limit or 0) + self.config.batch_step
        most = view.limits[instance.degree].max_requests
        return LimitBatch(instance.id, size if size < most else None, "SLOs are met under a lower load")

    def _growth(self, view: ClusterView, merging: set[int], devices: Collection[int]) -> list[Action]:
        """Return the action that replicates layers or a whole instance by Algorithm 1, or an empty list.

        Algorithm 1 visits the instances, those with the most running requests first, until it finds an action.

        Args:
            merging: devices that merge.
            devices: devices that may get layers.
        """
        hosts = {d for d in devices if d not in merging and can_host(view, d)}
        busiest = sorted(view.instances, key=lambda i: (-self.monitor.sequences[i.id], i.id))
        for instance in busiest:
            if instance.degree > 1 or instance.draining or not merging.isdisjoint(instance.devices):
                continue
            left = hosts.difference(instance.devices)
            while (change := self._addition(view, instance, left)) is not None:
                if identity(change) not in view.refused_changes:
                    return [change]
                left.remove(change.device)
        return []

    def _addition(self, view: ClusterView, instance: InstanceView, hosts: set[int]) -> PlacementChange | None:
        """Return the action that replicates layers on the device to which Algorithm 1 gives the most layers.

        The action is a `ScaleOut` if this device is empty and gets all layers, and `CocoServeConfig.scale_out` is set.
        In all other cases, it is a `Replicate`. Return None if Algorithm 1 replicates no layers.

        Args:
            hosts: devices that may get layers.
        """
        layer = view.layer
        assert layer is not None, "the sizes of a layer are known"
        most = 1 + len(hosts)
        if not self.monitor.violated:
            most = int(self.monitor.sequences[instance.id] // self.config.split_batch)
        if most < 2 or not hosts:
            return None
        room = {}
        for device in hosts:
            weights = 0.0 if holds_weights(view, device) else layer.weight_bytes
            free_bytes = view.devices[device].free_bytes - (layer.other_bytes if weights else 0.0)
            replica = weights + instance.capacity_tokens * layer.kv_token_bytes / 2
            room[device] = max_replicas(free_bytes, replica, layer.num_layers)
        homes = layer_homes(instance, layer.num_layers)
        added = scale_up(homes, instance.devices, room, layer.transition_cost, most)
        if not added:
            return None
        device = min(added, key=lambda device: (-len(added[device]), device))
        share = f"{self.monitor.vacancy[device]:.0%} of device {device} is vacant"
        whole = len(added[device]) == layer.num_layers and instance.placement is None and _is_empty(view, device)
        if self.config.scale_out and whole:
            return ScaleOut(instance.id, device, f"{share}, and it holds all layers")
        run = _longest_run(added[device])
        return Replicate(instance.id, run, device, f"{share}, and has room for {room[device]} layers")

    def _scale_in(self, view: ClusterView, merging: set[int]) -> list[Action]:
        """Return the action that ends an instance if few requests are left, or an empty list.

        Few requests are left if no request waits, and if the remaining instances would run fewer than half of
        `split_batch` requests each. Only an instance that this policy started can end.
        """
        plain = [i for i in view.instances if i.degree == 1 and i.placement is None and not i.draining]
        plain = [i for i in plain if i.id not in merging and not view.guests(i.id)]
        requests = sum(self.monitor.sequences[i.id] for i in plain)
        if len(plain) < 2 or requests / (len(plain) - 1) >= self.config.split_batch / 2 or view.queue:
            return []
        for ending in sorted(plain, key=lambda i: (len(i.running), i.id)):
            for other in sorted(plain, key=lambda i: (-i.free_tokens, i.id)):
                fits = other.free_tokens >= ending.used_tokens and other.free_slots >= len(ending.running)
                change = ScaleIn(other.id, ending.id, f"{requests:.1f} requests run on {len(plain)} instances")
                allowed = ending.id in self._scaled_out and identity(change) not in view.refused_changes
                if allowed and fits and other is not ending:
                    return [change]
        return []


def _is_empty(view: ClusterView, device: int) -> bool:
    return not view.instances_on((device,)) and not view.guests(device)


def _undo(
    view: ClusterView, instance: InstanceView, only: Collection[int] | None, why: str
) -> Iterator[PlacementChange]:
    """Yield actions that bring the layers of an instance back to its own devices.

    Args:
        only: devices that the layers must leave. None: all devices except the instance's own.
        why: reason for the log.
    """
    assert view.layer is not None, "the sizes of a layer are known"
    homes = layer_homes(instance, view.layer.num_layers)
    for device, run in replica_runs(instance, homes):
        if only is None or device in only:
            yield Evict(instance.id, run, device, why)
    moved = [(layer, *moved) for layer in range(len(homes)) for moved in _moved_modules(instance, layer)]
    for (modules, device), run in itertools.groupby(moved, key=lambda entry: entry[1:]):
        layers = [layer for layer, *_ in run]
        if only is None or device in only:
            yield Migrate(instance.id, (layers[0], layers[-1] + 1), instance.id, why, modules)


def _moved_modules(instance: InstanceView, layer: int) -> list[tuple[Modules, int]]:
    """Return `(modules, device)` for each migrated module of a layer. The modules are attention and FFN.

    A module has migrated if only one device computes it, and this device is not the instance's own. If both modules
    have migrated to the same device, the result has one pair, in which `modules` is "layer".
    """
    attention, ffn = (instance.homes(layer, modules)[0] for modules in ("attention", "ffn"))
    if attention == ffn:
        modules: list[tuple[Modules, Homes]] = [("layer", attention)]
    else:
        modules = [("attention", attention), ("ffn", ffn)]
    return [(kind, home[0]) for kind, home in modules if len(home) == 1 and home != instance.devices]


def _longest_run(layers: tuple[int, ...]) -> tuple[int, int]:
    """Return the longest run of consecutive layers as (first layer, layer after the last)."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1]:
            runs[-1][1] = layer + 1
        else:
            runs.append([layer, layer + 1])
    first, end = max(runs, key=lambda run: (run[1] - run[0], -run[0]))
    return first, end
