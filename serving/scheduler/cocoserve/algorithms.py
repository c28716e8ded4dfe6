"""Algorithms 1 and 2 of the CoCoServe paper as pure functions.

Algorithm 1 chooses layers to replicate. Algorithm 2 reduces the work of an instance whose requests violate their
latency limits (SLOs).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from serving.scheduler.actions import Evict, LimitBatch, Migrate, Modules, Offload, identity
from serving.scheduler.cocoserve.config import CocoServeConfig
from serving.scheduler.cocoserve.speedup import Homes, count_transitions, even_speedup
from serving.scheduler.view import ClusterView, InstanceView

MAX_DEVICES = 3
"""Maximum number of devices that one call of `scale_up` considers."""
MAX_STATES = 40_000
"""Maximum number of entries in a table of `scale_up`: about 0.1 s for a model of 32 layers."""
SHORT = 0.1
"""Free share of memory below which a device counts as short of memory.

A migration leaves this share of a target free.
"""
BUSY = 0.9
"""Utilization from which a device counts as busy: it has no computing time left."""
MARGIN = 0.25
"""Minimum difference between two devices for a migration: of their free shares of memory, or of their utilizations."""
_LAYER = 10**12
"""Cost of a layer with one home in the search of `scale_up`: the unit of its integer costs."""
_TIE = 10**3
"""Extra cost of each replica and of each transition. It decides between placements of equal speed-up."""
_NEVER = 10**18
"""Cost of placements that do not fit."""
Reduction = tuple[Migrate | Evict | LimitBatch | Offload, ...]
"""Actions of one reduction: a migration, an eviction, or a limit of the batch and the offloads for it."""


def placement_speedup(homes: Sequence[Homes], head: Homes, transition_cost: float) -> float:
    """Return the factor by which replicated layers speed up an instance (Equation 4).

    Args:
        homes: devices that compute each layer.
        head: devices of the embedding and the output projection.
        transition_cost: constant of Equation 4 (`speedup.transition_cost`).
    """
    return even_speedup([len(layer) for layer in homes], count_transitions(homes, head), transition_cost)


def max_replicas(free_bytes: float, replica_bytes: float, num_layers: int) -> int:
    """Return the number of layers whose copies fit on a device, at most `num_layers`.

    Args:
        free_bytes: free bytes of the device.
        replica_bytes: bytes of one copied layer: its KV cache, plus its weights if the device lacks these weights.
        num_layers: number of layers of the model.
    """
    return max(min(int(free_bytes // replica_bytes), num_layers), 0)


def scale_up(
    homes: Sequence[Homes],
    head: Homes,
    room: Mapping[int, int],
    transition_cost: float,
    max_degree: int | None = None,
) -> dict[int, tuple[int, ...]]:
    """Choose the layers to replicate on each device (Algorithm 1). Return the new layers of each device, ascending.

    The result has only devices that get new layers. Existing replicas stay. The chosen placement has the highest
    speed-up (Equation 4). Among equal placements, it has the fewest replicas and transitions. A transition is a move of
    hidden states between devices, from one layer to the next.

    A dynamic program over the layers finds the placement. The paper instead visits one device after another, and adds
    single layers while the speed-up grows. The paper's search can miss a useful run of layers: a run
    costs two transitions, which may be too much for one layer but not for the whole run.

    Args:
        homes: devices that compute each layer.
        head: devices of the embedding and the output projection.
        room: maximum number of new replicas on each device (`max_replicas`). The search has tables whose size is about
            the product of these numbers. It considers only the `MAX_DEVICES` devices with the highest numbers, and
            fewer devices if the size would exceed `MAX_STATES`.
        transition_cost: constant of Equation 4 (`speedup.transition_cost`).
        max_degree: maximum number of devices of a layer. None: no maximum.
    """
    considered: dict[int, int] = {}
    for device in sorted(room, key=lambda device: (-room[device], device))[:MAX_DEVICES]:
        sizes = [count + 1 for count in (*considered.values(), room[device]) if count < len(homes)]
        if not considered or math.prod(sizes) <= MAX_STATES:
            considered[device] = room[device]
    rooms = tuple(sorted(considered.items()))
    best = _best_placement(tuple(homes), head, rooms, transition_cost, max_degree)
    added = {d: tuple(i for i, layer in enumerate(best) if d in layer and d not in homes[i]) for d in considered}
    return {device: layers for device, layers in added.items() if layers}


@lru_cache(maxsize=32)
def _best_placement(
    homes: tuple[Homes, ...],
    head: Homes,
    rooms: tuple[tuple[int, int], ...],
    transition_cost: float,
    max_degree: int | None,
) -> tuple[Homes, ...]:
    """Return the devices that compute each layer in the placement with the lowest cost. Results are cached.

    A layer on `n` devices costs `1 / n`. Each transition adds `transition_cost`. Costs are scaled to integers, so that
    equal placements have equal costs.

    A dynamic program visits the layers from the last to the first. After each layer, there is a table `costs[home]` for
    each set of devices `home` that can compute the layer. The entries are the lowest total costs of the visited layers.
    The table has one axis for each device in `rooms`. The index on an axis is the number of new replicas on the device.
    If the device has room for every layer, its axis has length 1.
    """
    import numpy as np  # imported here, because the package imports only the standard library

    missing = {device: sum(device not in layer for layer in homes) for device, _ in rooms}
    counted = {device: axis for axis, (device, room) in enumerate(rooms) if room < missing[device]}
    start = np.full([room + 1 if device in counted else 1 for device, room in rooms], _NEVER)
    start[(0,) * start.ndim] = 0
    costs: dict[Homes, np.ndarray] = {head: start}
    # If a transition costs as much as all layers together, no replica is worth it. Higher costs change nothing.
    per_transition, visited = round(min(transition_cost, len(homes)) * _LAYER) + _TIE, []
    for layer in reversed(homes):
        tables = np.stack(list(costs.values()))
        lowest, cheapest = tables.min(axis=0) + per_transition, tables.argmin(axis=0).astype(np.uint8)
        options, stays, new = list(costs), {}, {}
        for added in _additions(layer, [device for device, _ in rooms], max_degree):
            home = tuple(sorted({*layer, *added}))
            stay = costs[home] if home in costs else lowest + 1
            stays[home] = stay <= lowest
            total = np.minimum(stay, lowest) + _LAYER // len(home) + _TIE * len(added)
            for axis in (counted[device] for device in added if device in counted):
                total = np.roll(total, 1, axis)
                total[(slice(None),) * axis + (0,)] = _NEVER
            new[home] = total
        visited.append((options, cheapest, stays))
        costs = new
    ends = {home: cost + per_transition * (home != head) for home, cost in costs.items()}
    home = min(ends, key=lambda home: int(ends[home].min()))
    taken = np.array(np.unravel_index(ends[home].argmin(), start.shape), dtype=int)
    result = []
    for layer, (options, cheapest, stays) in zip(homes, reversed(visited), strict=True):
        result.append(home)
        for device in set(home) - set(layer):
            if device in counted:
                taken[counted[device]] -= 1
        if not stays[home][tuple(taken)]:
            home = options[cheapest[tuple(taken)]]
    return tuple(result)


def _additions(layer: Homes, devices: Sequence[int], max_degree: int | None) -> Iterator[tuple[int, ...]]:
    """Yield the sets of devices on which a layer can be replicated, largest first. The last set is empty."""
    free = [device for device in devices if device not in layer]
    most = len(free) if max_degree is None else min(len(free), max(max_degree - len(layer), 0))
    for size in range(most, -1, -1):
        yield from itertools.combinations(free, size)


def scale_down(
    view: ClusterView,
    instance: InstanceView,
    config: CocoServeConfig,
    slow: bool,
    violated: Callable[[], bool],
) -> Iterator[Reduction]:
    """Yield changes that reduce the work of an instance that violates its latency limits (Algorithm 2).

    The changes come in three phases: layers migrate, replicas are evicted, and the batch is reduced. The caller must
    carry out each change before it asks for the next. The iteration ends as soon as `violated` returns False. Changes
    that were refused recently are left out.

    Args:
        view: state before the first change.
        instance: instance that violates its SLOs.
        config: settings.
        slow: reason of the violation. True: decode steps exceed the TPOT SLO, and layers do not migrate to gain memory.
            False: requests wait too long, and the batch is not reduced, because a smaller batch would make requests
            wait longer. The paper does not distinguish the two cases.
        violated: function that returns whether the violation persists.
    """
    state = _Reductions(view, instance, config, slow)
    phases = [state.migrations(), state.evictions(), *([state.batch_reductions()] if slow else [])]
    for phase in phases:
        while violated():
            if (reduction := next(phase, None)) is None:
                break
            yield reduction
        else:
            return


class _Reductions:
    """State of `scale_down` after the changes so far. Each public method yields the changes of one phase.

    Attributes:
        free: free bytes by device.
        homes: devices that compute the attention of each layer, by instance id.
    """

    def __init__(self, view: ClusterView, instance: InstanceView, config: CocoServeConfig, slow: bool):
        assert view.layer is not None, "placement changes need the sizes of a layer"
        self._view, self._instance, self._config, self._layer = view, instance, config, view.layer
        self._slow = slow
        self._kv_bytes = instance.used_tokens * view.layer.kv_token_bytes
        self.free = {device.id: device.free_bytes for device in view.devices}
        self.homes = {i.id: layer_homes(i, view.layer.num_layers) for i in view.instances}

    def free_share(self, device: int) -> float:
        return self.free[device] / max(self._view.devices[device].memory_bytes, 1.0)

    # Phase 1

    def migrations(self) -> Iterator[Reduction]:
        """Yield actions that migrate layers from the instance's own device, beginning with the last layers.

        A layer can migrate if no other device computes it. Layers migrate for two reasons:

        - Requests wait because the device is short of memory: layers migrate until the device has enough memory.
        - The device is busy with layers of several instances: only one migration is yielded. If the device is busy with
          layers of one instance, a migration would not help, because the two devices would wait for each other.
        """
        if self._instance.degree > 1:
            return
        source, homes = self._instance.id, self.homes[self._instance.id]
        count = math.ceil(self._config.migrated_share * len(homes))
        shared = bool(self._view.guests(source))
        alone = [i for i in range(len(homes)) if all(home == (source,) for home in self._instance.homes(i))]
        while True:
            short = not self._slow and self.free_share(source) < SHORT
            busy = shared and self._view.devices[source].utilization >= BUSY
            layers = _last_run(alone)[-count:]
            if not layers or not (short or busy):
                return
            why = "short of memory" if short else "busy with several instances"
            first, end, refused = layers[0], layers[-1] + 1, self._view.refused_changes
            options = [
                (Migrate(self._instance.id, (first, end), target, "", modules, move_kv=modules != "ffn"), num_bytes)
                for target, modules, num_bytes in self._targets(source, layers, short)
            ]
            option = next((option for option in options if identity(option[0]) not in refused), None)
            if option is None:
                return
            action, num_bytes = option
            free = f"{self.free_share(action.device):.0%} of the memory of device {action.device} is free"
            alone = [i for i in alone if i not in layers]
            if action.modules != "ffn":
                homes[first:end] = [(action.device,)] * len(layers)
            self.free[source] += num_bytes
            self.free[action.device] -= num_bytes
            yield (replace(action, reason=f"device {source} is {why}; {free}"),)
            if not short:
                return  # The present utilization says nothing about the next migration.

    def _targets(self, source: int, layers: Sequence[int], short: bool) -> list[tuple[int, Modules, float]]:
        """Return `(device, modules, bytes)` for each device to which layers can migrate, best first.

        `modules` are the modules to move, and `bytes` is the memory that the modules need on the device. If the device
        has computing time left, it gets whole layers, or only the FFNs if whole layers do not fit. If the device has no
        computing time left, it gets only the KV cache (section 3.3 of the CoCoServe paper).

        Args:
            source: device that computes the layers now.
            layers: consecutive layers.
            short: whether the source lacks memory. False: the source lacks computing time.
        """
        view, homes, options = self._view, self.homes[self._instance.id], []
        beside = {d for i in (layers[0] - 1, layers[-1] + 1) if 0 <= i < len(homes) for d in homes[i]}
        for device in view.devices:
            relieved = device.utilization + MARGIN <= view.devices[source].utilization
            if short:
                relieved = self.free_share(device.id) >= self.free_share(source) + MARGIN
            if device.id == source or not relieved or not can_host(view, device.id):
                continue
            has_weights = holds_weights(view, device.id)
            ffn, weights = (0.0, 0.0) if has_weights else (self._layer.ffn_bytes, self._layer.weight_bytes)
            choices: list[tuple[Modules, float]] = [("layer", weights + self._kv_bytes), ("ffn", ffn)]
            if device.utilization >= BUSY:
                choices = [("kv", self._kv_bytes)]
            room = (1 - SHORT) * self.free[device.id] / len(layers)
            if fitting := [(modules, size * len(layers)) for modules, size in choices if size <= room]:
                key = (device.id not in beside, -self.free_share(device.id))
                options.append((key, (device.id, *fitting[0])))
        return [option for _, option in sorted(options)]

    # Phase 2

    def evictions(self) -> Iterator[Reduction]:
        """Yield actions that evict replicated layers from devices that compute layers of several instances.

        Replicas of other instances leave the devices of this instance. Replicas of this instance leave the devices of
        other instances. Each action evicts a run of consecutive layers. The run that contributes least to the speed-up
        is evicted first.
        """
        while True:
            options = []
            for owner in self._view.instances:
                for device, run in replica_runs(owner, self.homes[owner.id]):
                    own_device = any(device in i.devices for i in self._view.instances)
                    beside = own_device if owner.id == self._instance.id else device in self._instance.devices
                    action = Evict(owner.id, run, device)
                    if beside and identity(action) not in self._view.refused_changes:
                        options.append((self._loss(owner, device, run), action))
            if not options:
                return
            loss, action = min(options, key=lambda option: (option[0], identity(option[1])))
            homes = self.homes[action.instance_id]
            for layer in range(*action.layers):
                homes[layer] = tuple(d for d in homes[layer] if d != action.device)
            yield (replace(action, reason=f"the least useful replica there: it speeds up its instance by {loss:.2f}"),)

    def _loss(self, owner: InstanceView, device: int, run: tuple[int, int]) -> float:
        homes, cost = self.homes[owner.id], self._layer.transition_cost
        without = [
            tuple(d for d in home if d != device) if run[0] <= i < run[1] else home for i, home in enumerate(homes)
        ]
        return placement_speedup(homes, owner.devices, cost) - placement_speedup(without, owner.devices, cost)

    # Phase 3

    def batch_reductions(self) -> Iterator[Reduction]:
        """Yield reductions of the batch. Each reduction lowers the limit of running requests by `batch_step`.

        A reduction has a `LimitBatch`, and an `Offload` for each request beyond the new limit. The least urgent
        requests are offloaded: their KV pages move to host memory.
        """
        step = self._config.batch_step
        running = sorted(self._instance.running, key=lambda r: (r.rank, r.arrival_s, r.request_id))
        while len(running) > step:
            size = max(len(running) - step, step)
            running, least_urgent = running[:size], running[size:]
            reason = f"steps exceed the TPOT SLO with {size + len(least_urgent)} requests"
            limit = LimitBatch(self._instance.id, size, reason)
            yield (limit, *(Offload(r.request_id, f"{reason}, and it is less urgent") for r in least_urgent))


# Placements in a snapshot


def layer_homes(instance: InstanceView, num_layers: int) -> list[Homes]:
    """Return the devices that compute the attention of each layer of an instance."""
    return [instance.homes(layer, "attention")[0] for layer in range(num_layers)]


def replica_runs(instance: InstanceView, homes: Sequence[Homes]) -> list[tuple[int, tuple[int, int]]]:
    """Return the runs of consecutive layers that are replicated on devices other than the instance's own.

    A run is `(device, (first layer, layer after the last))`. `homes` is the result of `layer_homes`.
    """
    found = []
    for device in sorted({device for layer in homes for device in layer} - set(instance.devices)):
        left = [i for i, layer in enumerate(homes) if device in layer and len(layer) > 1]
        while left:
            run = _last_run(left)
            found.append((device, (run[0], run[-1] + 1)))
            left = left[: -len(run)]
    return found


def can_host(view: ClusterView, device: int) -> bool:
    """Return whether a device may compute layers of other instances.

    The device must be empty, or have an instance of degree 1 that is not merging, splitting or draining.
    """
    return all(i.degree == 1 and i.transition_to is None and not i.draining for i in view.instances_on((device,)))


def holds_weights(view: ClusterView, device: int) -> bool:
    """Return whether a device holds the weights of all layers.

    This is the case if an instance of degree 1 is on the device and computes all layers there.
    """
    assert view.layer is not None, "placement changes need the sizes of a layer"
    own = view.instances_on((device,))
    return any(all(device in home for home in layer_homes(i, view.layer.num_layers)) and i.degree == 1 for i in own)


def _last_run(layers: Sequence[int]) -> Sequence[int]:
    """Return the last run of consecutive numbers in an ascending sequence: `[1, 2, 5, 6]` gives `[5, 6]`."""
    first = next((k for k in range(len(layers) - 1, 0, -1) if layers[k] != layers[k - 1] + 1), 0)
    return layers[first:]
