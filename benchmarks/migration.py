"""Time to move the KV pages of one layer from 4 x TP1 to TP4 and back, by order of the elements in a page.

    python benchmarks/migration.py [--pages 832] [--repeats 15]

A share is the part of a page that one rank stores at TP4. In header-centric order, a share is one contiguous run of
memory. The benchmark exchanges such shares in place, and also copies them into a new pool (variant `basic`). Most
engines use page-friendly order, in which a share is `2 * page_size` runs: the keys or the values of one token each.
Such shares are only copied, because an exchange in place would leave holes. All results are compared with NumPy.
"""

import argparse
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
from baselines.copying import compile_defragment, compile_migrate
from rich.console import Console
from rich.table import Table

from amoeba_jax.platform import serving_devices
from kvcache.allocator import BuddyAllocator
from kvcache.exchange import compile_exchange, exchange_kinds, join_phases
from kvcache.geometry import PageGeometry
from kvcache.migration import plan_phases
from kvcache.relayout import moves, place_down, place_up
from sharding.mesh import SubMesh

TP, PHASE_PAGES, FULL = 4, 16, 0.9
GEOMETRY = PageGeometry(kv_heads=4, page_size=16, head_dim=64, max_tp=TP)
F32 = jnp.dtype("float32")


@dataclass(frozen=True)
class Figures:
    """Median seconds of a merge and of a split, and the maximum bytes on a device in addition to the pool."""

    up_s: float
    down_s: float
    extra_bytes: int


def rows(pages: np.ndarray, share: int | None, runs: int) -> np.ndarray:
    """Return the indexes of the runs that store one share of each page, in the pool of a rank.

    Args:
        pages: page ids.
        share: index of the share in a page at TP1. None: the pool is at TP4, and has only one share of each page.
        runs: number of runs in a share.
    """
    runs_of = pages[:, None] * runs + np.arange(runs)
    return (runs_of if share is None else runs_of * TP + share).reshape(-1)


class Copied:
    """Mover that copies all pages into new pools.

    A page at TP1 is `[runs, TP, elems]`, and a share at TP4 is `[runs, elems]`.

    Args:
        num_pages: number of pages in the pool of each rank.
        pages: ids of the used pages of each rank at TP1, `[TP, used pages]`.
        runs: number of runs in a share: 1 in header-centric order, `2 * page_size` in page-friendly order.
    """

    def __init__(self, group: SubMesh, num_pages: int, pages: np.ndarray, runs: int):
        self.group, self.pages, self.runs = group, pages, runs
        run_elems = GEOMETRY.page_elems // TP // self.runs
        # The programs treat a run as a piece.
        geometry = PageGeometry(TP, 1, run_elems // 2, TP)
        extent, count = (num_pages * self.runs,), pages.shape[1] * self.runs
        self.migrate = compile_migrate(geometry, F32, group, extent, count)
        self.defragment = compile_defragment(geometry, F32, group, extent, extent, count)
        at_tp1 = [[rows(pages[r], share, self.runs) for share in range(TP)] for r in range(TP)]
        at_tp4 = [rows(np.arange(len(p)) + r * len(p), None, self.runs) for r, p in enumerate(pages)]
        # Rank r stores the pages of instance r at TP1, and share r of all pages at TP4.
        mine = np.array([[at_tp1[r][r ^ i] for i in range(TP)] for r in range(TP)], np.int32)
        theirs = np.array([[at_tp4[r ^ i] for i in range(TP)] for r in range(TP)], np.int32)
        self.ids = [jax.device_put(ids, group.sharded) for ids in (mine, theirs)]

    def put(self, pages: np.ndarray) -> np.ndarray:
        """Return pages `[pages, heads, 2, tokens, dim]` as rows in the memory order of the pool."""
        if self.runs == 1:
            return pages.reshape(len(pages), -1)
        return pages.transpose(0, 2, 3, 1, 4).reshape(len(pages), -1)

    def move(self, pool: jax.Array, up: bool) -> jax.Array:
        send, receive = self.ids if up else self.ids[::-1]
        (fresh,) = self.defragment([pool], self.migrate([pool], send), send, receive)
        return fresh

    def shares(self, pool: np.ndarray) -> np.ndarray:
        """Return the shares of all pages in a pool at TP4, as `[ranks, pages, elements of a share]`."""
        return pool.reshape(TP, -1, GEOMETRY.page_elems // TP)[:, : self.pages.size]

    def extra_bytes(self) -> int:
        migrate, defragment = (p.memory_analysis() for p in (self.migrate, self.defragment))
        received = migrate.output_size_in_bytes
        first = migrate.temp_size_in_bytes + received
        return max(first, received + defragment.temp_size_in_bytes + defragment.output_size_in_bytes)


class InPlace:
    """Mover that exchanges shares within the existing pool, in phases."""

    runs = 1

    def __init__(self, group: SubMesh, num_pages: int, pages: np.ndarray):
        def allocators() -> list[BuddyAllocator]:
            made = [BuddyAllocator(TP) for _ in range(TP)]
            for allocator in made:
                allocator.add_extent(num_pages)
            return made

        tables = [page_ids[None].astype(np.int32) for page_ids in pages]
        references = [np.ones(pages.shape[1], int)] * TP
        high = place_up(tables, references, GEOMETRY, allocators())
        low = place_down(high, references, GEOMETRY, allocators())
        self.high, self.low = high, low
        self.programs = {
            kind: compile_exchange(GEOMETRY, F32, group, (num_pages,), (num_pages,), PHASE_PAGES, kind)
            for kind in exchange_kinds(TP, loop=True)
        }
        # Merge again, from the places of the pages after the split.
        self.exchanges = [
            [
                (exchange.kind, *(jax.device_put(ids, group.sharded) for ids in (exchange.send, exchange.receive)))
                for exchange in join_phases(plan_phases(*moves(old, new), TP, PHASE_PAGES), loop=True)
            ]
            for old, new in ((low, high), (high, low))
        ]
        self.pages = np.stack([table[0] for table in low])

    def put(self, pages: np.ndarray) -> np.ndarray:
        return pages.reshape(len(pages), -1)

    def move(self, pool: jax.Array, up: bool) -> jax.Array:
        for kind, send, receive in self.exchanges[0 if up else 1]:
            (pool,) = self.programs[kind]([pool], send, receive)
        return pool

    def shares(self, pool: np.ndarray) -> np.ndarray:
        pieces = pool.reshape(TP, -1, GEOMETRY.page_elems // TP)
        return np.stack([np.concatenate([pieces[r][table[r]] for table in self.high]) for r in range(TP)])

    def extra_bytes(self) -> int:
        return max(program.memory_analysis().temp_size_in_bytes for program in self.programs.values())


def measure(way: Copied | InPlace, group: SubMesh, num_pages: int, repeats: int) -> Figures:
    """Time repeated merges and splits. Check the pages after the first merge and after the last split."""
    random = np.random.default_rng(0)
    used = way.pages.shape[1]
    shape = (TP, used, GEOMETRY.kv_heads, 2, GEOMETRY.page_size, GEOMETRY.head_dim)
    contents = random.standard_normal(shape, np.float32)
    pool = np.zeros((TP, num_pages, GEOMETRY.page_elems), np.float32)
    for rank in range(TP):
        pool[rank, way.pages[rank]] = way.put(contents[rank])
    heads = GEOMETRY.kv_heads // TP
    expected = [
        np.concatenate([way.put(contents[i][:, r * heads : (r + 1) * heads]) for i in range(TP)]) for r in range(TP)
    ]
    array = jax.device_put(jnp.array(pool.reshape(-1, GEOMETRY.page_elems // way.runs), copy=True), group.sharded)
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(repeats + 1):
        for up in (True, False):
            start = perf_counter()
            array = way.move(array, up)
            array.block_until_ready()
            times[up].append(perf_counter() - start)
            if turn == 0 and up:
                np.testing.assert_array_equal(way.shares(np.asarray(array)), expected)
    after = np.asarray(array).reshape(TP, num_pages, -1)
    for rank in range(TP):
        np.testing.assert_array_equal(after[rank, way.pages[rank]], way.put(contents[rank]))
    return Figures(median(times[True][1:]), median(times[False][1:]), way.extra_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=832, help="pages of each device, of which 90% are in use")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    group = SubMesh(0, serving_devices(TP))
    random = np.random.default_rng(1)
    used = round(FULL * options.pages)
    pages = np.stack([random.permutation(options.pages)[:used] for _ in range(TP)])
    ways = {
        "page-friendly, copied": Copied(group, options.pages, pages, 2 * GEOMETRY.page_size),
        "header-centric, copied": Copied(group, options.pages, pages, 1),
        "header-centric, in place": InPlace(group, options.pages, pages),
    }
    moved = used * TP * GEOMETRY.page_elems * F32.itemsize * (TP - 1) / TP / 2**20
    table = Table(
        title=f"{options.pages} pages a device, {FULL:.0%} in use, {moved:.0f} MiB to move between devices; f32"
    )
    for column in ("", "up, ms", "down, ms", "up, of the first", "down, of the first", "extra a device, MiB"):
        table.add_column(column, justify="left" if not column else "right")
    first = None
    for name, way in ways.items():
        found = measure(way, group, options.pages, options.repeats)
        first = first or found
        table.add_row(
            name,
            f"{found.up_s * 1e3:.1f}",
            f"{found.down_s * 1e3:.1f}",
            f"{found.up_s / first.up_s:.2f}x",
            f"{found.down_s / first.down_s:.2f}x",
            f"{found.extra_bytes / 2**20:.1f} ({found.extra_bytes / first.extra_bytes:.3f}x)",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
