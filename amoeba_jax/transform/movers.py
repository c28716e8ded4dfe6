"""Move the pages of a layer to a new layout in place, and restore the released weights of the layer.

Released weights are weights whose memory serves as KV cache.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from amoeba_jax.programs.restore import source_place
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.weights.store import WeightStore
from kvcache.exchange import Exchange, ExchangeKind, join_phases
from kvcache.migration import Phase, plan_phases
from kvcache.relayout import moves
from sharding.release import ReleasedShard

Tables = list[np.ndarray]
Restored = tuple[ReleasedShard, ...]


class PlacedExchange(NamedTuple):
    """Exchange of page pieces between ranks, with the ids of the pieces in arrays on the devices.

    Attributes:
        kind: kind of the program that runs the exchange.
        send: ids of the pieces that each rank sends, as in `Exchange.send`. Sharded over the ranks.
        receive: ids to which each rank writes the pieces that arrive, as in `Exchange.receive`. Sharded over the ranks.
    """

    kind: ExchangeKind
    send: jax.Array
    receive: jax.Array


@dataclass(frozen=True)
class MovePlan:
    """Size of the page moves of one layer. All layers have page moves of equal size.

    Attributes:
        num_pieces: number of pieces (parts of pages) that move.
        num_phases: number of phases in which pieces move. In a phase, all ranks exchange a bounded number of pieces.
    """

    num_pieces: int
    num_phases: int


class InPlaceMover:
    """Launcher of the programs that move the pages and restore the weights of a layer.

    Pages move inside the extents (page buffers) that the layer already has. The moves run in phases: exchanges of
    bounded size between ranks. `move`, `run` and `restore` launch programs and return before the programs have run.

    Attributes:
        exchanges: list of all exchanges of the latest plan, in the order of their launch.
    """

    def __init__(self, programs: TransitionPrograms, weights: WeightStore):
        self._programs, self._weights = programs, weights
        self.exchanges: list[PlacedExchange] = []
        self._phases: list[Phase] = []
        self._divided: dict[int, tuple[list[PlacedExchange], list[PlacedExchange]]] = {}

    def prepare(self, max_pieces: int) -> int:
        """Compile missing programs. Return the most bytes of temporary memory that one program needs on a device.

        The programs move pages and restore weights. `max_pieces` is the maximum number of page pieces that move. If
        `max_pieces` is 0, programs that move pages are left out.
        """
        exchanges = self._programs.exchanges if max_pieces else {}
        return self._programs.move_temporaries(pages=bool(exchanges))

    def plan(self, old: Tables, new: Tables) -> MovePlan:
        """Plan the page moves of a layer. Return the number of pieces that move and the number of phases.

        `divided` and `move` use this plan until `plan` is called again.

        Args:
            old: list of tables, one for each lane, with the page ids in the old layout. A table has a row for each rank
                and a column for each page.
            new: list of tables with the page ids in the new layout. `old` and `new` have the pages in the same order.
        """
        programs = self._programs
        source, target = moves(old, new)
        self._phases = plan_phases(source, target, programs.group.tp, programs.phase_pieces)
        self.exchanges = self._placed(self._joined(self._phases))
        self._divided.clear()
        return MovePlan(len(source), len(self._phases))

    def divided(self, most: int) -> tuple[list[PlacedExchange], list[PlacedExchange]]:
        """Divide the exchanges of the latest plan into `(exchanges in separate programs, exchanges in step programs)`.

        The separate programs run first. The step programs run the last phases of the plan: at most `most` exchanges,
        with one phase each. There is no step program for a phase of distance 0, in which each rank moves pieces only
        inside its own memory. Such a phase and all phases before it run in separate programs.
        """
        if most not in self._divided:
            count = 0
            while count < min(most, len(self._phases)) and self._phases[-1 - count].distance != 0:
                count += 1
            first, last = self._phases[: len(self._phases) - count], self._phases[len(self._phases) - count :]
            single = [exchange for phase in last for exchange in join_phases([phase], loop=False)]
            self._divided[most] = self._placed(self._joined(first)), self._placed(single)
        return self._divided[most]

    def _joined(self, phases: list[Phase]) -> list[Exchange]:
        return join_phases(phases, loop=self._programs.plan.loops_exchanges)

    def _placed(self, exchanges: list[Exchange]) -> list[PlacedExchange]:
        return [PlacedExchange(exchange.kind, *_put_ids(self._programs, exchange)) for exchange in exchanges]

    def move(self, extents: list[jax.Array]) -> list[jax.Array]:
        """Move all pages of a layer to the new layout, as planned by `plan`. Return the extents after the moves.

        Args:
            extents: list of all extents (page buffers) of the layer, `[tp * pages, page_elems]` each. Donated.
        """
        return self.run(self.exchanges, extents)

    def run(self, exchanges: list[PlacedExchange], extents: list[jax.Array]) -> list[jax.Array]:
        """Run `exchanges` on the extents (page buffers) of a layer. Return the new extents. Donates `extents`."""
        for kind, send, receive in exchanges:
            extents = self._programs.exchanges[kind](extents, send, receive)
        return extents

    def restore(self, released: Restored, extents: list[jax.Array]) -> list[jax.Array]:
        """Turn extents of a layer back into weights. Return the weights. Donates `extents`.

        Args:
            released: weight shards to restore.
            extents: for each entry of `released`, the page buffer in the memory that held the weights of this entry.
        """
        return self._programs.restore(_sources(self._programs, self._weights, released), extents)


def _put_ids(programs: TransitionPrograms, moved: Exchange | Phase) -> tuple[jax.Array, jax.Array]:
    sharding = programs.group.sharded
    return jax.device_put(moved.send, sharding), jax.device_put(moved.receive, sharding)


def _sources(programs: TransitionPrograms, weights: WeightStore, released: Restored) -> list[jax.Array]:
    """Return the weight shards that ranks send to each other to restore `released`.

    The result has one array over the group for each entry of `released`. The part of the array on a rank is a shard
    that this rank has kept. In the restore, the rank sends this shard to a rank that has released it.
    """
    places = [source_place(one, programs.dims.max_tp, programs.group) for one in released]
    return [weights.assembled(programs.group, one.spec, place) for one, place in zip(released, places, strict=True)]
