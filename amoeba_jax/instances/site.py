"""Site: the KV cache of one home, and the launch of the segments that the home computes.

A home is a group of devices that computes some modules together. A module is the attention or the FFN of a layer. A
segment is a part of the model that one program computes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from amoeba_jax.instances.hidden_states import StepStates
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.weights.store import WeightStore
from sharding.mesh import SubMesh, replaced_if_lost

KvBuffers = list[list[jax.Array]]
"""KV extents of each layer: lists of arrays `[tp * pages, page_elems]`. Layers of other homes have empty lists."""


class ExchangePart(NamedTuple):
    """Page exchange inside the program of a segment (part of the model). A page exchange moves KV pages between ranks.

    The moved pages belong to layers outside the segment.

    Attributes:
        program: compiled program that computes the segment and also exchanges the pages.
        layers: indices of the layers whose pages move.
        send, receive: ids of the page pieces that each rank sends and receives, `[tp, 1, *pieces]`.
    """

    program: jax.stages.Compiled
    layers: range
    send: jax.Array
    receive: jax.Array


class Site:
    """Buffers of the modules that one home (device group) computes. Used by the dispatcher thread only.

    `kv[layer]` is the list of KV extents (page buffers) of a layer. Each extent is sharded over the ranks. The programs
    of a step take extents as donated arguments, and return new arrays in the same memory. The new arrays replace the
    extents in `kv`.

    Programs run in the order of their launches. A freed page can therefore be reused at once: a program that overwrites
    the page runs after all earlier programs that read the page.

    Args:
        group: devices of the home.
        kv: KV extents of each layer.
        extent_pages: number of pages of each extent of a layer, on one rank. All layers have the same numbers.
        constants: scalar arrays on all ranks: False, True and, if the model has experts, the index of each layer
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
        """Launch the programs of segments that this home computes. Return the new hidden states and loads of experts.

        Donates `states`, and the KV extents that the programs use. If a program fails, some of these buffers are lost.

        Args:
            segments: parts of the model to compute, in order.
            programs: compiled programs, one for each segment.
            states: hidden states and loads of experts before the first segment.
            packed: inputs of the step (`StepBatch.packed`). None if all segments are dense FFNs.
            last_tokens: last token of each slot, `[num_slots]` on all ranks. None if no segment includes the embedding.
            exchanges: page exchanges that run inside the programs of segments, by segment. The moved pages belong to
                layers of this site that are not in the segment.
            begins: whether the first segment begins the step with the embeddings of the tokens.
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
        """Return the weights of a segment, in the order in which the segment's program takes the weights."""
        return self._store.view(self.group, segment)

    def replace_lost(self) -> None:
        """Put a new extent of zeros in place of each KV extent that a failed program has lost."""
        for extents in self.kv:
            extents[:] = replaced_if_lost(extents, self.group)

    def extents(self) -> Iterator[jax.Array]:
        """Yield the KV extents of all layers."""
        for extents in self.kv:
            yield from extents
