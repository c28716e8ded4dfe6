"""Copies of KV pages: to other pages of an instance, to host memory, and back from host memory to devices."""

import jax
import numpy as np

from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import HostPages, Sequence
from amoeba_jax.programs.program_specs import ProgramSpec
from sharding.placement import Home


def copy_specs(instance: Instance) -> list[ProgramSpec]:
    """Return the specs (descriptions) of the programs that `copy_page` needs."""
    specs, sites = instance.runner.executables.specs, instance.runner.sites.values()
    return [specs.page_copy(site.group, site.extent_pages) for site in sites if any(site.kv)]


def copy_page(instance: Instance, lane: Lane, source: np.ndarray, target: np.ndarray) -> None:
    """Launch a copy of one page of a lane to another page, in all layers.

    Donates the KV cache, layer by layer. If a program fails, some of the KV cache is lost.

    Args:
        source: ids of the page to copy, one for each row of the lane's block tables, `[rows]`.
        target: ids of the page to overwrite, one for each row of the lane's block tables, `[rows]`.
    """
    runner = instance.runner
    for home, layers in runner.placement.layers_by_home(instance.lanes.index(lane)).items():
        site, ranks = runner.sites[home], lane.ranks[home]
        ids = np.stack([source[ranks], target[ranks]], axis=1).astype(np.int32)  # [tp, 2]
        program = runner.executables.get(runner.executables.specs.page_copy(site.group, site.extent_pages))
        columns = jax.device_put(ids, site.group.sharded)
        for layer in layers:
            site.kv[layer] = program(site.kv[layer], columns)


def host_specs(instance: Instance) -> list[ProgramSpec]:
    """Return the specs (descriptions) of the programs that `read_to_host` and `write_from_host` need.

    The result includes the programs of all homes (device groups) of the instance.
    """
    specs, count = instance.runner.executables.specs, instance.runner.plan.transfer_pages
    sites = [site for site in instance.runner.sites.values() if any(site.kv)]
    return [
        make(site.group, site.extent_pages, count) for site in sites for make in (specs.page_read, specs.page_write)
    ]


def read_to_host(instance: Instance, sequence: Sequence) -> HostPages:
    """Launch programs that copy the pages of a sequence to host memory, and return the copies.

    The copies do not change if later programs overwrite the pages on the devices.
    """
    runner, count = instance.runner, instance.runner.plan.transfer_pages
    layers: list[list[tuple[jax.Array, int]]] = [[] for _ in range(runner.placement.num_layers)]
    for home, ids, of_home in _places(instance, sequence):
        site = runner.sites[home]
        program = runner.executables.get(runner.executables.specs.page_read(site.group, site.extent_pages, count))
        host = site.group.sharded
        if "pinned_host" in {memory.kind for memory in site.group.devices[0].addressable_memories()}:
            host = host.with_memory_kind("pinned_host")
        for first in range(0, ids.shape[1], count):
            part = _padded(ids[:, first : first + count], count)
            used = min(count, ids.shape[1] - first)
            for layer in of_home:
                layers[layer].append((jax.device_put(program(site.kv[layer], part), host), used))
    return HostPages(sequence.num_computed, layers)


def write_from_host(instance: Instance, sequence: Sequence) -> None:
    """Launch programs that copy the pages of an offloaded sequence from host memory back to devices.

    The copies go to the pages in `sequence.pages`. Donates the KV cache, layer by layer.
    """
    runner, count, pages = instance.runner, instance.runner.plan.transfer_pages, sequence.host_pages
    assert pages is not None, "it was offloaded"
    for home, ids, of_home in _places(instance, sequence):
        site = runner.sites[home]
        program = runner.executables.get(runner.executables.specs.page_write(site.group, site.extent_pages, count))
        for layer in of_home:
            contents = pages.whole(layer, home.degree)
            for first in range(0, len(contents), count):
                part = contents[first : first + count]
                block = np.zeros((home.degree, count, part.shape[2]), part.dtype)
                block[:, : len(part)] = part.transpose(1, 0, 2)
                target = _padded(ids[:, first : first + len(part)], count)
                data = jax.device_put(block.reshape(-1, part.shape[2]), site.group.sharded)
                site.kv[layer] = program(site.kv[layer], target, data)


def _places(instance: Instance, sequence: Sequence) -> list[tuple[Home, np.ndarray, tuple[int, ...]]]:
    """Return `(home, ids, layers)` for each home (device group) that has pages of a sequence.

    `ids` are the ids of these pages on the ranks of the home, `[tp, pages]`. `layers` are the layers whose pages are at
    the home.
    """
    lane = instance.lane_of(sequence)
    assert sequence.pages is not None, "it has pages"
    homes = instance.runner.placement.layers_by_home(instance.lanes.index(lane))
    return [(home, lane.table(sequence.pages, home), layers) for home, layers in homes.items()]


def _padded(ids: np.ndarray, num_pages: int) -> np.ndarray:
    return np.pad(ids, ((0, 0), (0, num_pages - ids.shape[1])), constant_values=-1).astype(np.int32)
