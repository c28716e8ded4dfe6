"""Moves of a layer's pages to the new layout, and restoring of its weights."""

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
    """An `Exchange` whose arrays of ids are on the devices, sharded over the ranks."""

    kind: ExchangeKind
    send: jax.Array
    receive: jax.Array


@dataclass(frozen=True)
class MovePlan:
    """Size of the page moves of one layer. It is the same for all layers.

    Attributes:
        num_pieces: number of pieces of pages that move.
        num_phases: number of exchanges between ranks that move them.
    """

    num_pieces: int
    num_phases: int


class InPlaceMover:
    """Launcher of programs that move pages within the present extents, and restore weights in place.

    Pages move in phases of bounded size. The methods launch programs and never wait for them.

    Attributes:
        exchanges: exchanges of the present plan, in order.
    """

    def __init__(self, programs: TransitionPrograms, weights: WeightStore):
        self._programs, self._weights = programs, weights
        self.exchanges: list[PlacedExchange] = []
        self._phases: list[Phase] = []
        self._divided: dict[int, tuple[list[PlacedExchange], list[PlacedExchange]]] = {}

    def prepare(self, max_pieces: int) -> int:
        """Compile missing programs. Return the maximum bytes of temporaries on a device.

        Args:
            max_pieces: maximum number of pieces that one rank sends to another. 0: no pages move.
        """
        exchanges = self._programs.exchanges if max_pieces else {}
        return self._programs.move_temporaries(pages=bool(exchanges))

    def plan(self, old: Tables, new: Tables) -> MovePlan:
        """Plan the moves of pages from the old to the new layout.

        The tables are arguments of `kvcache.relayout.moves`.
        """
        programs = self._programs
        source, target = moves(old, new)
        self._phases = plan_phases(source, target, programs.group.tp, programs.phase_pieces)
        self.exchanges = self._placed(self._joined(self._phases))
        self._divided.clear()
        return MovePlan(len(source), len(self._phases))

    def divided(self, most: int) -> tuple[list[PlacedExchange], list[PlacedExchange]]:
        """Return the plan in two parts: exchanges to run as separate programs, and exchanges for step programs.

        The second part has the last exchanges of the plan, at most `most`. Each exchange there has one phase and moves
        pieces between different ranks.
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
        """Move the pages of a layer to the new layout. Return the extents after the moves.

        Args:
            extents: all extents of the layer in both layouts, `[tp * pages, page_elems]` each. Donated.
        """
        return self.run(self.exchanges, extents)

    def run(self, exchanges: list[PlacedExchange], extents: list[jax.Array]) -> list[jax.Array]:
        """Run some exchanges of the plan on the extents of a layer. Donates `extents`."""
        for kind, send, receive in exchanges:
            extents = self._programs.exchanges[kind](extents, send, receive)
        return extents

    def restore(self, released: Restored, extents: list[jax.Array]) -> list[jax.Array]:
        """Write the weights of released shards into the extents that these shards had become. Donates `extents`."""
        return self._programs.restore(_sources(self._programs, self._weights, released), extents)


def _put_ids(programs: TransitionPrograms, moved: Exchange | Phase) -> tuple[jax.Array, jax.Array]:
    sharding = programs.group.sharded
    return jax.device_put(moved.send, sharding), jax.device_put(moved.receive, sharding)


def _sources(programs: TransitionPrograms, weights: WeightStore, released: Restored) -> list[jax.Array]:
    """Return the shards that ranks send to each other so that the shards `released` can be restored."""
    places = [source_place(one, programs.dims.max_tp, programs.group) for one in released]
    return [weights.assembled(programs.group, one.spec, place) for one, place in zip(released, places, strict=True)]
