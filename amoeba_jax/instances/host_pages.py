"""Copies of a sequence's KV pages to host memory and back.

They are used while the sequence waits for room on a device.
"""

from collections.abc import Sequence as SequenceOf

import jax
import numpy as np

from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.offloaded import HostPages
from amoeba_jax.instances.runner import Runner
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.program_specs import ProgramSpec
from sharding.placement import Home


def page_specs(runner: Runner, executables: Executables, num_pages: int) -> list[ProgramSpec]:
    """Return the programs that read and write `num_pages` pages at each home of an instance."""
    specs, sites = executables.specs, [site for site in runner.sites.values() if any(site.kv)]
    return [
        make(site.group, site.extent_pages, num_pages) for site in sites for make in (specs.page_read, specs.page_write)
    ]


def read_to_host(
    runner: Runner, executables: Executables, lanes: SequenceOf[Lane], sequence: Sequence, num_pages: int
) -> HostPages:
    """Launch copies of a sequence's pages to host memory. Programs that are launched later may overwrite the pages.

    Args:
        num_pages: number of pages that a program reads at once.
    """
    layers: list[list[tuple[jax.Array, int]]] = [[] for _ in range(runner.placement.num_layers)]
    for home, ids, of_home in _places(runner, lanes, sequence):
        site = runner.sites[home]
        program = executables.get(executables.specs.page_read(site.group, site.extent_pages, num_pages))
        host = site.group.sharded
        if "pinned_host" in {memory.kind for memory in site.group.devices[0].addressable_memories()}:
            host = host.with_memory_kind("pinned_host")
        for first in range(0, ids.shape[1], num_pages):
            part = _padded(ids[:, first : first + num_pages], num_pages)
            used = min(num_pages, ids.shape[1] - first)
            for layer in of_home:
                layers[layer].append((jax.device_put(program(site.kv[layer], part), host), used))
    return HostPages(sequence.num_computed, layers)


def write_from_host(
    runner: Runner, executables: Executables, lanes: SequenceOf[Lane], sequence: Sequence, num_pages: int
) -> None:
    """Write the pages of a sequence from host memory to its new pages on devices.

    Donates the KV cache, layer by layer.
    """
    pages = sequence.host_pages
    assert pages is not None, "it was offloaded"
    for home, ids, of_home in _places(runner, lanes, sequence):
        site = runner.sites[home]
        program = executables.get(executables.specs.page_write(site.group, site.extent_pages, num_pages))
        for layer in of_home:
            contents = pages.whole(layer, home.degree)
            for first in range(0, len(contents), num_pages):
                part = contents[first : first + num_pages]
                block = np.zeros((home.degree, num_pages, part.shape[2]), part.dtype)
                block[:, : len(part)] = part.transpose(1, 0, 2)
                target = _padded(ids[:, first : first + len(part)], num_pages)
                data = jax.device_put(block.reshape(-1, part.shape[2]), site.group.sharded)
                site.kv[layer] = program(site.kv[layer], target, data)


def _places(
    runner: Runner, lanes: SequenceOf[Lane], sequence: Sequence
) -> list[tuple[Home, np.ndarray, tuple[int, ...]]]:
    """Return the homes that have pages of a sequence, each with the page ids `[tp, pages]` and the layers there."""
    (number,) = [number for number, lane in enumerate(lanes) if sequence in lane.running]
    assert sequence.pages is not None, "it has pages"
    homes = runner.placement.layers_by_home(number)
    return [(home, lanes[number].table(sequence.pages, home), layers) for home, layers in homes.items()]


def _padded(ids: np.ndarray, num_pages: int) -> np.ndarray:
    return np.pad(ids, ((0, 0), (0, num_pages - ids.shape[1])), constant_values=-1).astype(np.int32)
