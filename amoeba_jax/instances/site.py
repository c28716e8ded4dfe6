"""KV cache of one home, and the launch of segments there."""

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
"""Extents of each layer, `[tp * pages, page_elems]` each; an empty list for a layer at another home."""


class ExchangePart(NamedTuple):
    """A segment's program that also runs a phase of an exchange of other layers' pages.

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

    `kv[layer]` is the layer's list of extents, sharded over the ranks. Every step donates the extents and stores the
    returned arrays, which are the same memory. So a later program sees the writes of an earlier one, and a page may be
    reused before the steps that read it have run.

    Args:
        kv: extents of every layer.
        extent_pages: pages of each extent on a rank, the same for all layers.
        begins: values false and true of a flag, on all ranks. The flag is true for the segment that begins a step.
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
        """Return the program of each segment for steps of a shape. Raises the errors of `Executables.get`."""
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
        """Launch segments of a step, and return the new buffer of hidden states.

        Donates the cache of their layers and `hidden`. If a program fails, some of these buffers are lost.

        Args:
            packed: batch of the step; None for FFNs.
            last_tokens: `[num_slots]` on all ranks; None if no segment embeds.
            exchanges: segments whose programs also exchange pages of other layers of this site.
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
        """Return a segment's weights, in the order in which its programs take them."""
        return self._store.view(self.group, segment)

    def replace_lost(self) -> None:
        """Replace the extents that failed programs have lost by zeros."""
        for extents in self.kv:
            extents[:] = replaced_if_lost(extents, self.group)

    def extents(self) -> Iterator[jax.Array]:
        """Yield all extents."""
        for extents in self.kv:
            yield from extents
