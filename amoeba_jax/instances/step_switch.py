"""Layers that change their home within a step: their pages move in the programs that compute other layers."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax

from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape


class ExchangePart(NamedTuple):
    """A phase of an exchange in the program of a segment.

    Attributes:
        program: what runs for the segment instead of its own.
        layers: those whose pages move.
        send: ids of the phase, over the ranks: `[tp, 1, *pieces]`.
        receive: likewise.
    """

    program: jax.stages.Compiled
    layers: range
    send: jax.Array
    receive: jax.Array


class StepSwitch(Protocol):
    """A switch that the next step is to launch, around what it computes at the instance's own home.

    When merging, the layers have computed the step at the lower degree when it begins; when splitting, they compute it
    there after it has ended.
    """

    def begin(self, shape: BatchShape | None) -> Mapping[SegmentPlan, ExchangePart]:
        """Launch what comes before, and return what is to run with which segments. `shape` is that of a step of all
        lanes, None for others."""
        ...

    def end(self) -> None:
        """Have the layers be where they are to be."""
        ...
