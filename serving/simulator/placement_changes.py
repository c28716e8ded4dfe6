"""Placement changes on a simulated host. A placement change copies, moves or removes layers while requests run.

The layers of a change switch in groups, one group after the other. Steps continue while weights are copied. The
instance runs no step while the KV cache of a group moves.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from serving.scheduler import DeviceView, Evict, Migrate, PlacementChange, Replicate, ScaleIn, ScaleOut
from serving.scheduler.cocoserve.speedup import Homes
from serving.simulator.host import Host, drained_s, take_in
from serving.simulator.host_config import Refusal
from serving.simulator.instance import SimInstance
from serving.simulator.run import Run
from serving.simulator.spread import LayerCost, Spread

_GROUPS = 8
"""Number of groups of layers that switch one after the other in a change of all layers."""
_SAMPLE_S = 1.0
"""Seconds over which the utilization of devices is measured."""


@dataclass
class _Progress:
    """Placement change that has not ended.

    Attributes:
        action: requested change.
        instance: instance whose layers switch.
        left: layers that have not switched.
        due_s: time at which the next group of layers switches.
    """

    action: PlacementChange
    instance: SimInstance
    left: range
    due_s: float


class PlacementChanges:
    """Placement changes of a simulated host from start to end, and the memory of the host's devices.

    `SimInstance.spread` is the placement of the layers of an instance. It is None if the instance's own devices compute
    all layers of this instance and no layers of other instances.
    """

    def __init__(self, host: Host):
        self._host, self._running = host, list[_Progress]()
        self._new_times: list[float] = []
        self._pools: dict[int, float] = {}
        """Results of `_pool_bytes` for the present placements."""
        self._sampled_s = 0.0
        self._utilization = dict.fromkeys(range(host.config.num_devices), 0.0)

    @property
    def _cost(self) -> LayerCost:
        if self._host.config.layers is None:
            raise Refusal("this host has no data about layers, so that it changes no placement")
        return self._host.config.layers

    # Checks

    def check_group(self, members: Iterable[SimInstance]) -> None:
        """Raise `Refusal` if the placement of layers prevents a merge or split of the instances `members`.

        There are three reasons: a placement change of a member is in progress, another device computes layers of a
        member, or a device of a member computes layers of another instance.
        """
        for member in members:
            name = member.devices[0]
            if member.changes_placement:
                raise Refusal(f"a placement change of instance {name} is in progress")
            if member.spread is not None and not member.spread.is_home:
                raise Refusal(f"layers of instance {name} are on other devices: evict or migrate them first")
            if guests := self._guests(member.devices):
                raise Refusal(
                    f"device {name} computes layers of instance {guests[0].devices[0]}: evict or migrate them first"
                )

    def _guests(self, devices: Sequence[int]) -> list[SimInstance]:
        """Return the instances that compute layers on these devices, but do not own these devices."""
        return [
            i
            for i in self._host.instances
            if i.spread is not None and i.devices[0] not in devices and not i.spread.devices.isdisjoint(devices)
        ]

    def _find(self, instance_id: int) -> SimInstance:
        """Return the instance with the id `instance_id`.

        Raises `Refusal` if there is no such instance, or if the placement of its layers cannot change now.
        """
        instance = next((i for i in self._host.instances if i.devices[0] == instance_id), None)
        if instance is None:
            raise Refusal(f"there is no instance {instance_id}")
        self._check_steady(instance)
        return instance

    def _check_steady(self, instance: SimInstance) -> None:
        name = instance.devices[0]
        if instance.degree > 1:
            raise Refusal(f"instance {name} has TP{instance.degree}: split it first")
        if instance.change is not None or instance.waits_for is not None:
            raise Refusal(f"instance {name} is being transformed")
        if instance.changes_placement:
            raise Refusal(f"a placement change of instance {name} is in progress")

    def _check_target(self, device: int) -> None:
        if not 0 <= device < self._host.config.num_devices:
            raise Refusal(f"device {device} does not exist: there are {self._host.config.num_devices} devices")
        for owner in self._host.instances:
            if device in owner.devices:
                self._check_steady(owner)

    def _check_layers(self, action: Replicate | Evict | Migrate, spread: Spread) -> None:
        (first, end), device, count = action.layers, action.device, self._cost.sizes.num_layers
        if end > count:
            raise Refusal(f"layers {first} to {end - 1} do not exist: the model has {count} layers")
        for layer in range(first, end):
            for homes in _homes(spread, layer, action.modules):
                if isinstance(action, Evict):
                    if device not in homes or len(homes) == 1:
                        raise Refusal(f"layer {layer} has no replica on device {device}")
                elif device in homes:
                    raise Refusal(f"layer {layer} is on device {device} already")
                elif isinstance(action, Migrate) and len(homes) > 1:
                    raise Refusal(f"layer {layer} is replicated: evict its replicas first")

    # Memory

    def _pool_bytes(self, device: int) -> float:
        """Return the bytes of a device that KV cache may use: its memory without the weights of all instances there."""
        if (known := self._pools.get(device)) is not None:
            return known
        sizes, attention, ffn, other = self._cost.sizes, set[int](), set[int](), 0.0
        for instance in self._host.instances:
            if device in instance.devices:
                other = sizes.other_bytes
                if instance.degree > 1:
                    return instance.capacity_tokens * sizes.kv_token_bytes * sizes.num_layers / instance.degree
            if instance.spread is not None and device in instance.spread.devices:
                more = instance.spread.weight_layers(device)
                attention |= more[0]
                ffn |= more[1]
            elif device in instance.devices:
                attention, ffn = set(range(sizes.num_layers)), set(range(sizes.num_layers))
        weights = other + len(attention) * sizes.attention_bytes + len(ffn) * sizes.ffn_bytes
        pool = self._pools[device] = self._cost.device_bytes - weights
        return pool

    def _used_bytes(self) -> dict[int, float]:
        """Return the bytes of KV cache in use, by device."""
        sizes, used = self._cost.sizes, dict.fromkeys(range(self._host.config.num_devices), 0.0)
        for instance in self._host.instances:
            shares = dict.fromkeys(instance.devices, sizes.kv_token_bytes * sizes.num_layers / instance.degree)
            if instance.spread is not None:
                shares = instance.spread.cache_shares
            tokens = instance.used_tokens(instance.steps_at(self._host.now_s))
            tokens += sum(member.used_tokens() for member in instance.paused)
            for device, share in shares.items():
                used[device] += share * tokens
        return used

    def _free_bytes(self, device: int) -> float:
        return self._pool_bytes(device) - self._used_bytes()[device]

    def count_rooms(self) -> None:
        """Update `room_tokens` of each instance with a `spread`, from the free memory of its devices.

        `room_tokens` is the number of tokens that running requests may use. Other instances may use the same memory.
        """
        if self._host.config.layers is None:
            return
        spread = [i for i in self._host.instances if i.spread is not None]
        used = self._used_bytes() if spread else {}
        for instance in spread:
            shares = instance.spread.cache_shares if instance.spread else {}
            free = min((self._pool_bytes(d) - used[d]) / share for d, share in shares.items() if share)
            own, size = instance.used_tokens(instance.steps_at(self._host.now_s)), instance.page_size
            instance.room_tokens = own + math.floor(free / size) * size

    def count_capacities(self) -> None:
        """Update `spread` and capacity of all instances. Call this method after a change of placements or instances.

        `spread` becomes None if the instance's own device computes all layers of the instance and no other layers.
        """
        if self._host.config.layers is None:
            return
        self._pools.clear()
        for instance in self._host.instances:
            at_home = instance.spread is None or instance.spread.is_home
            if at_home and not (instance.degree == 1 and self._guests(instance.devices)):
                if instance.spread is not None:
                    instance.spread, instance.limits = None, self._host.limits[1]
                    instance.room_tokens = instance.capacity_tokens
                continue
            instance.spread = instance.spread or Spread.at_home(instance.devices[0], self._cost)
        for instance in self._host.instances:
            if (spread := instance.spread) is not None:
                tokens = min(self._pool_bytes(d) / share for d, share in spread.cache_shares.items() if share)
                capacity = max(math.floor(tokens / instance.page_size) * instance.page_size, 0)
                instance.limits = replace(self._host.limits[1], capacity_tokens=capacity)
        self.count_rooms()

    def devices(self) -> tuple[DeviceView, ...]:
        """Return the free resources of all devices, in the form that policies use."""
        self._sample()
        used, pools = self._used_bytes(), {device: self._pool_bytes(device) for device in self._utilization}
        return tuple(
            DeviceView(device, pools[device], max(pools[device] - used[device], 0.0), busy)
            for device, busy in self._utilization.items()
        )

    def _sample(self) -> None:
        """Measure the utilization of each device since the last sample: the share of the time with computation.

        Do nothing if the last sample is less than `_SAMPLE_S` seconds old.
        """
        passed_s = self._host.now_s - self._sampled_s
        if passed_s < _SAMPLE_S:
            return
        self._sampled_s = self._host.now_s
        busy = dict.fromkeys(self._utilization, 0.0)
        for instance in self._host.instances:
            share = instance.take_busy_s(self._host.now_s) / passed_s
            shares = instance.spread.time_shares if instance.spread else dict.fromkeys(instance.devices, 1.0)
            for device, part in shares.items():
                busy[device] += share * part
        self._utilization = {device: min(value, 1.0) for device, value in busy.items()}

    def crowd(self, instance: SimInstance) -> None:
        """Update `device_crowding`: for each device, the factor by which other busy instances slow down `instance`."""
        assert instance.spread is not None, "other instances share no device"
        busy = [i for i in self._host.instances if i is not instance and i.block is not None and i.spread is not None]
        instance.device_crowding = {
            d: 1 + sum(i.spread.time_shares.get(d, 0.0) for i in busy if i.spread) for d in instance.spread.devices
        }

    # Changes

    def start(self, action: PlacementChange, at_once: bool = False) -> None:
        """Start a placement change. Raises `Refusal` with the reason if it is not possible now.

        If `at_once` is set, all layers switch now at no cost. This is for placements at the start of a simulation.
        """
        instance = self._find(action.instance_id)
        spread = instance.spread or Spread.at_home(instance.devices[0], self._cost)
        layers = range(self._cost.sizes.num_layers)
        if isinstance(action, Replicate | Evict | Migrate):
            self._check_layers(action, spread)
            layers = range(*action.layers)
        if isinstance(action, ScaleIn):
            self._check_scale_in(action, instance)
        else:
            self._check_target(action.device)
            if isinstance(action, ScaleOut):
                self._check_scale_out(action, instance)
            if not isinstance(action, Evict):
                self._check_memory(action, instance, spread, layers)
        if at_once:
            self._switch(_Progress(action, instance, layers, 0.0), layers)
            return
        for member in self._members(action, instance):
            member.changes_placement = True
        change = _Progress(action, instance, layers, self._host.now_s)
        self._running.append(change)
        self._schedule(change)

    def _members(self, action: PlacementChange, instance: SimInstance) -> list[SimInstance]:
        ending = [i for i in self._host.instances if isinstance(action, ScaleIn) and i.devices[0] == action.device]
        return [instance, *ending]

    def _check_scale_out(self, action: ScaleOut, instance: SimInstance) -> None:
        if any(action.device in i.devices for i in self._host.instances) or self._guests((action.device,)):
            raise Refusal(f"device {action.device} is not empty")
        if instance.spread is not None and not instance.spread.is_home:
            raise Refusal(f"layers of instance {action.instance_id} are on other devices: evict or migrate them first")

    def _check_scale_in(self, action: ScaleIn, instance: SimInstance) -> None:
        ending = self._find(action.device)
        if ending is instance:
            raise Refusal(f"instance {action.device} cannot receive its own sequences")
        self.check_group([ending])
        if instance.room_tokens - instance.used_tokens() < ending.used_tokens():
            raise Refusal(f"the sequences of instance {action.device} do not fit instance {action.instance_id}")
        if instance.max_requests - len(instance.runs) < len(ending.runs):
            raise Refusal(f"instance {action.instance_id} lacks slots for the sequences of instance {action.device}")

    def _check_memory(
        self, action: Replicate | Migrate | ScaleOut, instance: SimInstance, spread: Spread, layers: range
    ) -> None:
        device, modules = action.device, getattr(action, "modules", "layer")
        needed = sum(self._copied_bytes(action, spread, layer) for layer in layers)
        if isinstance(action, ScaleOut):
            needed += self._cost.sizes.other_bytes
        if modules != "ffn":
            homes = 1 if isinstance(action, Migrate) else 2
            needed += len(layers) * instance.used_tokens() * self._cost.sizes.kv_token_bytes / homes
        free = self._free_bytes(device)
        if needed > free:
            raise Refusal(f"device {device} has {free / 1e9:.2f} GB free, but the layers need {needed / 1e9:.2f} GB")

    def _copied_bytes(self, action: PlacementChange, spread: Spread, layer: int) -> float:
        """Return the bytes of weights to copy for one layer: the weights that its new device does not have yet."""
        if isinstance(action, Evict | ScaleIn):
            return 0.0
        sizes, device, modules = self._cost.sizes, action.device, getattr(action, "modules", "layer")
        held = [
            i.spread.weight_layers(device) if i.spread else None
            for i in self._host.instances
            if device in (i.spread.devices if i.spread else i.devices)
        ]
        attention = any(h is None or layer in h[0] for h in held) or layer in spread.weight_layers(device)[0]
        ffn = any(h is None or layer in h[1] for h in held)
        copied = sizes.attention_bytes if modules != "ffn" and not attention else 0.0
        return copied + (sizes.ffn_bytes if modules in ("layer", "ffn") and not ffn else 0.0)

    def take_new_times(self) -> list[float]:
        """Return the virtual times at which `proceed` must be called. Each call returns only new times."""
        times, self._new_times = self._new_times, []
        return times

    def _group(self, change: _Progress) -> range:
        count = math.ceil(self._cost.sizes.num_layers / _GROUPS)
        return change.left if isinstance(change.action, ScaleIn) else change.left[:count]

    def _schedule(self, change: _Progress) -> None:
        """Set the switch time of the next group of layers: the time at which the copy of its weights ends."""
        cost, group = self._cost, self._group(change)
        spread = change.instance.spread or Spread.at_home(change.instance.devices[0], cost)
        num_bytes = sum(self._copied_bytes(change.action, spread, layer) for layer in group)
        self._host.tally.weight_bytes += num_bytes
        change.due_s = self._host.now_s + len(group) * cost.launch_s + num_bytes / cost.link_rate
        self._new_times.append(change.due_s)

    def proceed(self) -> None:
        """Switch the groups of layers whose weights have been copied. End the placement changes that are complete."""
        for change in [c for c in self._running if c.due_s <= self._host.now_s]:
            group = self._group(change)
            if not isinstance(change.action, ScaleIn):
                self._switch(change, group)
            change.left = change.left[len(group) :]
            if change.left:
                self._schedule(change)
            else:
                self._running.remove(change)
                self._end(change)

    def _switch(self, change: _Progress, layers: range) -> None:
        """Switch layers to their new devices. The steps of the instance wait until the KV cache has moved."""
        action, instance = change.action, change.instance
        spread = instance.spread or Spread.at_home(instance.devices[0], self._cost)
        modules = getattr(action, "modules", "layer")
        homes, moved = [], 0.0
        for layer in layers:
            before = _homes(spread, layer, modules)[0]
            if isinstance(action, Evict):
                after: Homes = tuple(d for d in before if d != action.device)
                moved += 1 / len(before)
            elif isinstance(action, Migrate):
                after = (action.device,)
                moved += 1.0
            else:
                after = tuple(sorted((*before, action.device)))
                moved += 1 / len(after)
            homes.append(after)
        instance.spread = spread.moved(layers, modules, homes)
        if modules != "ffn":
            kv_bytes = moved * instance.used_tokens() * self._cost.sizes.kv_token_bytes
            self._host.tally.kv_bytes += kv_bytes
            self._pause(instance, len(layers) * self._cost.launch_s + kv_bytes / self._cost.link_rate)
        self.count_capacities()

    def _pause(self, instance: SimInstance, seconds: float) -> None:
        """Delay the next step of an instance until `seconds` seconds after the end of the running step."""
        if instance.block is not None:
            self._host.disturb(instance)
            instance.ready_s = instance.block.end_s + seconds
        else:
            instance.ready_s = max(self._host.now_s, instance.ready_s) + seconds

    def _end(self, change: _Progress) -> None:
        action, instance, host = change.action, change.instance, self._host
        for member in self._members(action, instance):
            member.changes_placement = False
        if isinstance(action, ScaleOut):
            other = host.new_instance((action.device,))
            ordered = sorted(instance.runs.values(), key=lambda run: run.order)
            instance.spread = Spread.at_home(instance.devices[0], self._cost)
            self._move(instance, other, ordered[1::2])
            host.replace([], [other])
        elif isinstance(action, ScaleIn):
            other = next(i for i in host.instances if i.devices[0] == action.device)
            host.tally.kv_bytes += other.used_tokens() * self._cost.sizes.kv_token_bytes * self._cost.sizes.num_layers
            self._move(other, instance, list(other.runs.values()))
            host.replace([other], [])
        else:
            return
        self.count_capacities()
        host.rehome(instance)
        for member in (instance, other):
            if member in host.instances:
                host.begin(member)

    def _move(self, source: SimInstance, target: SimInstance, runs: Sequence[Run]) -> None:
        """Move requests with their KV pages to another instance. Requests that do not fit there are preempted."""
        host, size = self._host, target.page_size
        ready_s = max(drained_s(host, source), drained_s(host, target))
        take_in(host, source)
        take_in(host, target)
        for run in [run for run in runs if source.runs.get(run.request.request_id) is run]:
            used = target.used_tokens() + -(-(run.num_tokens(source.steps) + 1) // size) * size
            full = used > target.capacity_tokens or len(target.runs) >= target.max_requests
            if full or run.request.max_total_tokens > target.capacity_tokens:
                host.preempt(source, run)
                continue
            source.remove(run)
            target.take_over({run.request.request_id: run}, source.steps)
        for instance in (source, target):
            instance.ready_s = max(instance.ready_s, ready_s)


def _homes(spread: Spread, layer: int, modules: str) -> list[Homes]:
    if modules == "layer":
        return [spread.attention[layer], spread.ffn[layer]]
    return [spread.ffn[layer] if modules == "ffn" else spread.attention[layer]]
