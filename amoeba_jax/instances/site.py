"""KV cache of one home, and launches of the segments that the home computes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax

from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.weights.store import WeightStore
from sharding.mesh import SubMesh, replaced_if_lost

KvBuffers = list[list[jax.Array]]
"""KV extents of each layer, each `[tp * pages, page_elems]`. The list of a layer at another home is empty."""


class ExchangePart(NamedTuple):
    """Exchange of pages of other layers inside the program of a segment.

    Attributes:
        layers: layers whose pages move.
        send, receive: ids of the phase, over the ranks: `[tp, 1, *pieces]`.
    """

    program: jax.stages.Compiled
    layers: range
    send: jax.Array
    receive: jax.Array


class Site:
    """Buffers of the modules that one home computes. Used by the dispatcher thread only.

    `kv[layer]` is the layer's list of extents, sharded over the ranks. Every step gets the extents donated. The arrays
    that it returns are the same memory, and replace them in `kv`. Programs run in launch order, so a later program sees
    the writes of an earlier one. A page may therefore be reused before the steps that read it have run.

    Args:
        kv: extents of every layer.
        extent_pages: number of pages of each extent on a rank, the same for all layers.
        begins: the values False and True of a flag, on all ranks. The flag is True for the segment that begins a step.
    """

    def __init__(
        self,
        group: SubMesh,
        kv: KvBuffers,
        extent_pages: tuple[int, ...],
        plan: EnginePlan,
        weights: WeightStore,
        executables: Executables,
        begins: tuple[jax.Array, jax.Array],
    ):
        self.group, self.kv, self.extent_pages = group, kv, extent_pages
        self._plan, self._store, self._executables = plan, weights, executables
        self._begins = begins

    def programs(self, segments: Iterable[SegmentPlan], shape: BatchShape) -> list[jax.stages.Compiled]:
        """Return the program of each segment for steps of one shape. Raises the errors of `Executables.get`."""
        found: dict[tuple[object, ...], jax.stages.Compiled] = {}
        programs = []
        for segment in segments:
            kind = segment.kinds, segment.module, segment.embeds
            if kind not in found:
                spec = self._plan.layers_spec(self._executables.specs, self.group, segment, shape, self.extent_pages)
                found[kind] = self._executables.get(spec)
            programs.append(found[kind])
        return programs

    def run(
        self,
        segments: Iterable[SegmentPlan],
        programs: Iterable[jax.stages.Compiled],
        hidden: jax.Array,
        packed: jax.Array | None,
        last_tokens: jax.Array | None,
        exchanges: Mapping[SegmentPlan, ExchangePart] | None = None,
        *,
        begins: bool = True,
    ) -> jax.Array:
        """Launch segments of a step. Return the new buffer of hidden states.

        Donates the cache of their layers and `hidden`. If a program fails, some of these buffers are lost.

        Args:
            packed: batch of the step; None for FFNs.
            last_tokens: `[num_slots]` on all ranks; None if no segment embeds.
            exchanges: exchanges inside segment programs, by segment. They move pages of other layers of this site.
            begins: whether the segment of the first layer, or of the embedding, begins the step.
        """
        kv = self.kv
        no, yes = self._begins
        for segment, program in zip(segments, programs, strict=True):
            start, stop = segment.layers.start, segment.layers.stop
            weights = self.weights(segment)
            if segment.module == "ffn":
                _, hidden = program(weights, [], hidden)
                continue
            if not segment.embeds:
                kv[start:stop], hidden = program(weights, kv[start:stop], hidden, packed)
                continue
            arguments = weights, kv[start:stop], hidden, packed, last_tokens, yes if begins and not start else no
            if (part := exchanges.get(segment) if exchanges else None) is None:
                kv[start:stop], hidden = program(*arguments)
            else:
                first, last = part.layers.start, part.layers.stop
                found = part.program(*arguments, kv[first:last], part.send, part.receive)
                kv[start:stop], hidden, kv[first:last] = found
        return hidden

    def weights(self, segment: SegmentPlan) -> list[jax.Array]:
        """Return the weight arguments of a segment's programs, in order."""
        return self._store.view(self.group, segment)

    def replace_lost(self) -> None:
        """Put zeros in place of each extent that a failed program has lost."""
        for extents in self.kv:
            extents[:] = replaced_if_lost(extents, self.group)

    def extents(self) -> Iterator[jax.Array]:
        """Yield all extents."""
        for extents in self.kv:
            yield from extents
