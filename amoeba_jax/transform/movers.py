"""Moves of a layer's pages and weights to their places in the new layout."""

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
    """An `Exchange` whose ids are on the devices, over the ranks."""

    kind: ExchangeKind
    send: jax.Array
    receive: jax.Array


@dataclass(frozen=True)
class Plan:
    """What there is to move, the same for every layer.

    Attributes:
        num_pieces: pieces that change their place.
        num_phases: phases that move them.
    """

    num_pieces: int
    num_phases: int


class InPlaceMover:
    """Moves pages within the present extents, in phases of bounded size, and restores weights in place.

    Changes one layer after the other. Everything is launched, and nothing waited for.

    Attributes:
        exchanges: all of the plan, in order.
    """

    def __init__(self, programs: TransitionPrograms, weights: WeightStore):
        self._programs, self._weights = programs, weights
        self.exchanges: list[PlacedExchange] = []
        self._phases: list[Phase] = []
        self._divided: dict[int, tuple[list[PlacedExchange], list[PlacedExchange]]] = {}

    def prepare(self, max_pieces: int) -> int:
        """Compile the missing programs for up to that many pieces from one rank to another; 0: no pages are moved.

        Returns the most bytes that any device will need in addition.
        """
        exchanges = self._programs.exchanges if max_pieces else {}  # before anything changes: one may fail
        return self._programs.move_temporaries(pages=bool(exchanges))

    def plan(self, old: Tables, new: Tables) -> Plan:
        """Plan the moves between the pages' places in both views, given as `kvcache.relayout.moves` takes them."""
        programs = self._programs
        source, target = moves(old, new)
        self._phases = plan_phases(source, target, programs.group.tp, programs.phase_pieces)
        self.exchanges = self._placed(self._joined(self._phases))
        self._divided.clear()
        return Plan(len(source), len(self._phases))

    def divided(self, most: int) -> tuple[list[PlacedExchange], list[PlacedExchange]]:
        """The plan in two parts: last, up to `most` exchanges of one phase each, in all of which ranks trade with
        others; and what comes before them."""
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
        """Bring a layer's pages to their new places.

        Args:
            extents: all extents of the layer in either view, over the group's ranks. They are donated.

        Returns as many extents; the pages of the new view are valid.
        """
        return self.run(self.exchanges, extents)

    def run(self, exchanges: list[PlacedExchange], extents: list[jax.Array]) -> list[jax.Array]:
        """`move` by some exchanges of the plan."""
        for kind, send, receive in exchanges:
            extents = self._programs.exchanges[kind](extents, send, receive)
        return extents

    def restore(self, released: Restored, extents: list[jax.Array]) -> list[jax.Array]:
        """Restore the weights of a layer's released shards in the extents in their place, which are donated."""
        return self._programs.restore(_sources(self._programs, self._weights, released), extents)


def _put_ids(programs: TransitionPrograms, moved: Exchange | Phase) -> tuple[jax.Array, jax.Array]:
    sharding = programs.group.sharded
    return jax.device_put(moved.send, sharding), jax.device_put(moved.receive, sharding)


def _sources(programs: TransitionPrograms, weights: WeightStore, released: Restored) -> list[jax.Array]:
    """The shards that the ranks send each other when `released` are restored."""
    places = [source_place(one, programs.dims.max_tp, programs.group) for one in released]
    return [weights.assembled(programs.group, one.spec, place) for one, place in zip(released, places, strict=True)]
