"""Plan relocations: check the options, and find the new placement, the needed memory and the needed programs."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from amoeba_jax.errors import LayoutError, MemoryBudgetError, RequestError
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.instances.site import Site
from amoeba_jax.programs.enumeration import relocation_specs
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.transform.extra_extents import extra_pages
from amoeba_jax.transform.options import PlacementOptions
from amoeba_jax.transform.relayout_plan import sampler_kinds
from kvcache.allocator import BuddyAllocator
from sharding.ledger import format_bytes
from sharding.placement import Home, Homes, ModuleKind, Placement

Module = tuple[int, int, ModuleKind]
"""Module on a device: (device, layer, attention or FFN)."""


@dataclass(frozen=True)
class RelocationPlan:
    """Plan to replicate, migrate or remove modules of an instance (relocation). The relocation has not begun.

    Attributes:
        before: placement before the first switch. It already has as many microbatches as `after`.
        after: placement after the last switch.
        chunks: ranges of layers, in the order of their switches. The layers of a range switch together.
        extents: `{home: numbers of pages}` for each home of `after`: one number for each extent (page buffer) that a
            layer at the home has after the relocation.
        joining: instance that ends in a `scale_in`. The sequences of this instance become a microbatch of `instance`.
            None if the relocation is not a `scale_in`.
    """

    options: PlacementOptions
    instance: Instance
    before: Placement
    after: Placement
    chunks: tuple[range, ...]
    extents: dict[Home, tuple[int, ...]]
    joining: Instance | None = None

    @property
    def device_indices(self) -> set[int]:
        """Indices of all devices of the placements `before` and `after`."""
        return {*self.before.devices, *self.after.devices}

    @property
    def old(self) -> list[Instance]:
        """Instances that end because of the relocation: `[joining]` in a `scale_in`, otherwise an empty list."""
        return [] if self.joining is None else [self.joining]

    @property
    def draining(self) -> list[Instance]:
        """Instances whose steps in flight must end before the relocation begins: the instances in `old`."""
        return self.old

    def programs(self, cluster: Cluster) -> list[ProgramSpec]:
        """Return the specs (descriptions) of all programs that the relocation needs.

        These are programs of steps during the relocation, programs of steps after the relocation, and programs that
        copy pages.
        """
        placements = [self.before]
        for chunk in self.chunks:
            placements.append(placements[-1].with_layers(chunk, self.after))
        placements.append(self.after.joined()[0])
        extents = {home: site.extent_pages for home, site in self.instance.runner.sites.items()}
        if self.joining is not None:
            extents |= {home: site.extent_pages for home, site in self.joining.runner.sites.items()}
        during = extents | {home: pages[: len(extents.get(home, pages[:1]))] for home, pages in self.extents.items()}
        kinds, width = sampler_kinds([self.instance, *([self.joining] if self.joining else [])]), self.instance.width
        specs = [
            s for p in placements for s in relocation_specs(cluster.plan, cluster.executables, p, width, during, kinds)
        ]
        last = during | self.extents
        specs += relocation_specs(cluster.plan, cluster.executables, placements[-1], width, last, kinds)
        for home in {home for p in (self.before, self.after) for homes in p.attention for home in homes}:
            group, make = cluster.sub_meshes.group(home.start, home.degree), cluster.executables.specs
            sizes = during[home], cluster.plan.transfer_pages
            specs += [make.page_read(group, *sizes), make.page_write(group, *sizes)]
            if home in extents and during[home] != extents[home]:
                specs.append(make.page_copy(group, extents[home]))
        return list({spec.key: spec for spec in specs}.values())


def homes_of(placement: Placement) -> list[Home]:
    """Return each home of a placement once. The first home in the list is the home of the head."""
    modules = (*placement.attention, *placement.ffn)
    return list(dict.fromkeys([placement.head, *(home for homes in modules for home in homes)]))


def plan_relocation(cluster: Cluster, options: PlacementOptions) -> RelocationPlan:
    """Check the arguments of `LLM.replicate`, `evict`, `migrate`, `scale_out` or `scale_in`. Return the plan.

    Nothing is changed. Raises `LayoutError`, `RequestError` or `MemoryBudgetError` if the relocation is impossible.
    """
    instance = cluster.instance(options.instance)
    num_devices, home = len(cluster.sub_meshes.devices), Home(max(options.device, 0), 1)
    if not 0 <= options.device < num_devices:
        raise LayoutError(f"device {options.device} does not exist: there are devices 0 to {num_devices - 1}")
    placement, num_layers = instance.runner.placement, cluster.dims.config.num_layers
    layers = range(num_layers) if options.layers is None else options.layers
    module: ModuleKind = "attention" if options.modules == "kv" else options.modules
    if options.kind == "migrate" and not options.move_kv:
        if module != "layer":
            raise RequestError(
                f"move_kv=False does not fit modules={options.modules!r}: it leaves the attention in place"
            )
        module = "ffn"
    joining = None
    if options.kind in ("scale_out", "scale_in") and (instance.is_spread or instance.tp > 1):
        raise LayoutError(f"instance {instance.id} ({placement}) must have all layers on one device")
    if options.kind == "scale_out" and options.device not in cluster.empty_devices:
        raise LayoutError(f"device {options.device} is not empty: an instance scales out to an empty device")
    if options.kind in ("replicate", "scale_out"):
        after = placement.replicated(layers, module, home)
    elif options.kind == "evict":
        after = placement.evicted(layers, module, home)
    elif options.kind == "migrate":
        after = placement.migrated(layers, module, home)
    else:
        joining = _joining(cluster, instance, options.device)
        after = Placement.uniform(placement.head, num_layers, 2)
    before = placement.with_microbatches(after.num_microbatches)
    if joining is not None:
        before = before.with_modules(layers, "layer", (placement.head, home))
    changed = [n for n in range(num_layers) if _homes_at(before, n) != _homes_at(after, n)]
    _check(cluster, instance, before, after, changed)
    chunks = tuple(
        range(found[0], found[-1] + 1)
        for segment in cluster.plan.segments
        if (found := [layer for layer in segment.layers if layer in changed])
    )
    plan = RelocationPlan(options, instance, before, after, chunks, {}, joining)
    plan.extents.update(_extents(cluster, plan))
    return plan


def _joining(cluster: Cluster, instance: Instance, device: int) -> Instance:
    other = next((i for i in cluster.instances if i.group.device_indices == (device,)), None)
    if other is None or other is instance or other.is_spread:
        raise LayoutError(f"device {device} has no other instance with all of its layers: nothing can scale in")
    if cluster.sharing(other) != [other]:
        raise LayoutError(f"device {device} has layers of other instances: evict or migrate them first")
    total = len(instance.running) + len(other.running)
    if total > instance.max_running:
        raise RequestError(f"instance {instance.id} runs at most {instance.max_running} requests, and {total} run")
    return other


def _homes_at(placement: Placement, layer: int) -> tuple[tuple[Home, ...], tuple[Home, ...]]:
    return placement.attention[layer], placement.ffn[layer]


def _check(cluster: Cluster, instance: Instance, before: Placement, after: Placement, changed: list[int]) -> None:
    most = cluster.plan.width
    if after.num_microbatches > most:
        raise LayoutError(f"a layer on {after.num_microbatches} devices is not supported here: at most {most}")
    large = {h for layer in changed for p in (before, after) for homes in _homes_at(p, layer) for h in homes} - {
        Home(device, 1) for device in range(len(cluster.sub_meshes.devices))
    }
    if large:
        raise LayoutError(
            f"layers at {min(large)} do not replicate or migrate: only layers on one device do. Split the instance "
            "first"
        )
    devices = {*before.devices, *after.devices}
    cluster.check_in_service(devices)
    for other in cluster.instances:
        if devices.isdisjoint(other.devices):
            continue
        if other.transition is not None or other.phase is not Phase.SERVING:
            raise RequestError(f"instance {other.id} on these devices is changing: wait until it is done")
        if other.paused:
            raise RequestError(f"requests are paused on the devices of instance {other.id}: they must resume first")
        if other.tp > 1 and other is not instance:
            raise LayoutError(f"instance {other.id} computes on {other.group} together: split it first")


def _extents(cluster: Cluster, plan: RelocationPlan) -> dict[Home, tuple[int, ...]]:
    """Return, for each home of the new placement, the number of pages in each extent (page buffer) of a layer.

    Raises `MemoryBudgetError` if a device has too little memory for the modules that it gets. Raises `LayoutError` if a
    device without KV cache would have to compute attention.
    """
    found: dict[Home, tuple[int, ...]] = {}
    page_bytes = cluster.memory_plan.page_bytes
    source = plan.instance.runner.sites[plan.before.attention[plan.chunks[0].start if plan.chunks else 0][0]]
    for home in homes_of(plan.after):
        site = site_at(cluster, home)
        extents = source.extent_pages[:1] if site is None else site.extent_pages
        if home.degree > 1:
            found[home] = extents
            continue
        device, free = home.start, cluster.ledgers[home.start].free_bytes
        changed = [layer for chunk in plan.chunks for layer in chunk]
        gained = [m for layer in changed for m in difference(plan.after, plan.before, layer) if m[0] == device]
        lost = [m for layer in changed for m in difference(plan.before, plan.after, layer) if m[0] == device]
        lost = [m for m in lost if not is_used(cluster, m, plan.instance)]
        layers = {layer for layer, extent in enumerate([] if site is None else site.kv) if extent}
        new = {layer for _, layer, module in gained if module == "attention" and layer not in layers}
        if gained and len(extents) > 1:
            free += sum(extents[1:]) * page_bytes * len(layers)
            extents = extents[:1]
        if new and not sum(extents):
            raise LayoutError(f"device {device} has no KV cache: it cannot compute attention")
        needed = sum(cluster.weights.bytes_to_copy(*module) for module in gained)
        needed += sum(extents) * page_bytes * len(new) + (_fixed_bytes(cluster, plan) if site is None else 0)
        if needed > free:
            raise MemoryBudgetError(
                f"device {device} has {format_bytes(free)} left, and {format_bytes(needed)} are needed for "
                f"{len(new)} layers of KV cache and the missing weights: use fewer layers or a smaller kv_cache_tokens"
            )
        if lost and not gained and len(extents) == 1:
            gone = {layer for _, layer, module in lost if module == "attention"}
            free += sum(cluster.weights.held_bytes(*m) for m in lost if plan.options.modules != "kv")
            free += sum(extents) * page_bytes * len(gone)
            freed = free - cluster.unused_bytes(device)
            extents += extra_pages(extents[0], freed, (len(layers) - len(gone)) * page_bytes)
        found[home] = extents
    return found


def _fixed_bytes(cluster: Cluster, plan: RelocationPlan) -> int:
    """Return how many bytes a still empty device needs, besides the KV cache and the weights of its new modules.

    In a `scale_out`, the result includes the embedding, the head and the sampling state.
    """
    memory, weights = cluster.memory_plan, cluster.weights
    fixed = memory.hidden_bytes + memory.staging_bytes + cluster.activation_bytes
    if plan.options.kind == "scale_out":
        fixed += memory.sampling_bytes + weights.bytes_to_copy(plan.options.device, None)
    return fixed


def difference(one: Placement, other: Placement, layer: int) -> list[Module]:
    """Return the modules of a layer that the placement `one` has and the placement `other` lacks.

    A module is a tuple `(device, layer, kind)`. The kind is `attention` or `ffn`.
    """
    return sorted(_modules(one, layer) - _modules(other, layer))


def _modules(placement: Placement, layer: int) -> set[Module]:
    """Return all modules of a layer, on all devices of the placement, as tuples `(device, layer, kind)`."""
    pairs: list[tuple[ModuleKind, Homes]] = [
        ("attention", placement.attention[layer]),
        ("ffn", placement.ffn[layer]),
    ]
    return {(device, layer, kind) for kind, homes in pairs for home in homes for device in home.devices}


def is_used(cluster: Cluster, module: Module, but: Instance) -> bool:
    """Return whether any instance other than `but` computes `module`, a tuple `(device, layer, kind)`."""
    return any(module in _modules(i.runner.placement, module[1]) for i in cluster.instances if i is not but)


def site_at(cluster: Cluster, home: Home) -> Site | None:
    return next((i.runner.sites[home] for i in cluster.instances if home in i.runner.sites), None)


def in_use(cluster: Cluster, home: Home) -> bool:
    """Return whether any instance has a home that shares a device with `home`."""
    return any(home.overlaps(other) for instance in cluster.instances for other in instance.runner.sites)


def allocators_at(cluster: Cluster, home: Home) -> SequenceOf[BuddyAllocator] | None:
    return next((i.allocators[home] for i in cluster.instances if home in i.allocators), None)
