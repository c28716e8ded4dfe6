"""Site: the KV cache of one home, and launches of the segments that the home computes.

A home is a group of devices that computes some modules together. A segment is the part of a model that one program
computes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from amoeba_jax.instances.hidden_states import StepStates
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.weights.store import WeightStore
from sharding.mesh import SubMesh, replaced_if_lost

KvBuffers = list[list[jax.Array]]
"""KV extents of each layer, each `[tp * pages, page_elems]`. The list of a layer at another home is empty."""


class ExchangePart(NamedTuple):
    """Exchange of KV pages between ranks, which runs inside the program of a segment (part of the model).

    The pages belong to layers of other segments.

    Attributes:
        program: program that computes the segment and exchanges the pages.
        layers: layers whose pages move.
        send, receive: ids of the page pieces that each rank sends and receives, `[tp, 1, *pieces]`.
    """

    program: jax.stages.Compiled
    layers: range
    send: jax.Array
    receive: jax.Array


class Site:
    """Buffers of the modules that one home (device group) computes. Used by the dispatcher thread only.

    `kv[layer]` is the list of KV extents (page buffers) of a layer, sharded over the ranks. The programs of a step get
    the extents donated, and return arrays in the same memory. The returned arrays replace the extents in `kv`.

    Programs run in the order of their launches. A freed page can therefore be reused at once: the programs that
    overwrite the page run after all programs that still read the page.

    Args:
        kv: KV extents of each layer.
        extent_pages: number of pages of each extent on a rank, the same for all layers.
        constants: scalar arguments of programs, on all ranks: False, True, and with experts the index of each layer
            (`InstanceFactory.constants`).
    """

    def __init__(
        self,
        group: SubMesh,
        kv: KvBuffers,
        extent_pages: tuple[int, ...],
        weights: WeightStore,
        constants: Sequence[jax.Array],
    ):
        self.group, self.kv, self.extent_pages = group, kv, extent_pages
        self._store = weights
        self._no, self._yes, *self._layer_numbers = constants

    def run(
        self,
        segments: Iterable[SegmentPlan],
        programs: Iterable[jax.stages.Compiled],
        states: StepStates,
        packed: jax.Array | None,
        last_tokens: jax.Array | None,
        exchanges: Mapping[SegmentPlan, ExchangePart] | None = None,
        *,
        begins: bool = True,
    ) -> StepStates:
        """Launch the segments of a step that this home computes. Return the new hidden states and loads of experts.

        Donates `states`, and the KV cache of the layers that programs use. If a program fails, some of these buffers
        are lost.

        Args:
            segments: parts of the model to compute, in order.
            programs: program of each segment.
            states: hidden states and loads of experts before the first segment.
            packed: inputs of the step (`StepBatch.packed`). None if all segments are dense FFNs.
            last_tokens: last token of each slot, `[num_slots]` on all ranks. None if no segment embeds tokens.
            exchanges: page exchanges that also run in the programs of segments, by segment. The pages belong to other
                layers of this site.
            begins: whether the first segment begins the step.
        """
        kv, hidden, loads = self.kv, states.hidden, states.loads
        for segment, program in zip(segments, programs, strict=True):
            layers = slice(segment.layers.start, segment.layers.stop)
            attends = segment.module != "ffn"
            arguments = [self.weights(segment), kv[layers] if attends else []]
            arguments.append((hidden, loads) if segment.has_experts else hidden)
            if segment.takes_batch:
                arguments.append(packed)
            if segment.embeds:
                arguments += [last_tokens, self._yes if begins and not segment.start else self._no]
            if segment.has_experts:
                arguments.append(self._layer_numbers[segment.start])
            if (part := exchanges.get(segment) if exchanges else None) is None:
                extents, hidden = program(*arguments)
            else:
                others = slice(part.layers.start, part.layers.stop)
                extents, hidden, kv[others] = part.program(*arguments, kv[others], part.send, part.receive)
            if attends:
                kv[layers] = extents
            if segment.has_experts:
                hidden, loads = hidden
        return StepStates(hidden, loads)

    def weights(self, segment: SegmentPlan) -> list[jax.Array]:
        """Return the weights of a segment, in the order in which the segment's program takes them."""
        return self._store.view(self.group, segment)

    def replace_lost(self) -> None:
        """Put a new extent of zeros in place of each KV extent that a failed program has lost."""
        for extents in self.kv:
            extents[:] = replaced_if_lost(extents, self.group)

    def extents(self) -> Iterator[jax.Array]:
        """Yield the KV extents of all layers."""
        for extents in self.kv:
            yield from extents
