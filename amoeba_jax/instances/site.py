"""A group of devices that computes layers together, and the buffers that it computes them with."""

from collections.abc import Iterable, Iterator, Mapping

import jax

from amoeba_jax.instances.step_switch import ExchangePart
from amoeba_jax.models.decoder import SegmentPlan
from amoeba_jax.programs.batch import BatchShape
from amoeba_jax.programs.executables import Executables
from amoeba_jax.programs.plan import EnginePlan
from amoeba_jax.programs.program_specs import ProgramSpec
from amoeba_jax.weights.store import WeightStore
from sharding.mesh import SubMesh, replaced_if_lost

KvBuffers = list[list[jax.Array]]
"""Extents of each layer, `[tp * pages, page_elems]` each; none of a layer that is elsewhere."""


class Site:
    """Where layers are computed. Used by the dispatcher thread only.

    `kv[layer]` is that layer's list of extents, sharded over the ranks. Every step donates them and puts the returned
    arrays (the same memory) in their place. So whatever is launched later sees what was launched before, and a page may
    change hands before the steps that use it have run.

    Args:
        kv: of every layer that the site has.
        extent_pages: pages of each extent on a rank, the same for all layers.
        begins: what programs are told, on all ranks: that they do not begin a step, or that they do.
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

    def specs(self, segments: Iterable[SegmentPlan], shape: BatchShape) -> list[ProgramSpec]:
        """The programs that `programs` gives, each once."""
        kinds = {segment.windows: segment for segment in segments}
        return [self._request(segment, shape) for segment in kinds.values()]

    def programs(self, segments: Iterable[SegmentPlan], shape: BatchShape) -> list[jax.stages.Compiled]:
        """The programs of some segments, for steps of a shape. Raises whatever fetching one does."""
        found: dict[tuple[int | None, ...], jax.stages.Compiled] = {}
        programs = []
        for segment in segments:
            if segment.windows not in found:
                found[segment.windows] = self._executables.get(self._request(segment, shape))
            programs.append(found[segment.windows])
        return programs

    def _request(self, segment: SegmentPlan, shape: BatchShape) -> ProgramSpec:
        return self._plan.layers_spec(self._executables.specs, self.group, segment, shape, self.extent_pages)

    def run(
        self,
        segments: Iterable[SegmentPlan],
        programs: Iterable[jax.stages.Compiled],
        hidden: jax.Array,
        packed: jax.Array,
        last_tokens: jax.Array,
        exchanges: Mapping[SegmentPlan, ExchangePart] | None = None,
    ) -> jax.Array:
        """Dispatch layers of a step, without waiting; they begin with the tokens' embeddings if the first of the model
        is among them. Segments of `exchanges` run with these, of pages of other layers that the site has.

        Donates the cache of all these layers, and `hidden`, for which it returns the new buffer. What fails part-way
        has lost some of them.
        """
        kv = self.kv
        no, yes = self._begins
        for segment, program in zip(segments, programs, strict=True):
            start, stop = segment.layers.start, segment.layers.stop
            begins = no if start else yes
            arguments = self.weights(segment), kv[start:stop], hidden, packed, last_tokens, begins
            if (part := exchanges.get(segment) if exchanges else None) is None:
                kv[start:stop], hidden = program(*arguments)
            else:
                first, last = part.layers.start, part.layers.stop
                found = part.program(*arguments, kv[first:last], part.send, part.receive)
                kv[start:stop], hidden, kv[first:last] = found
        return hidden

    def weights(self, segment: SegmentPlan) -> list[jax.Array]:
        """A segment's weights, as its programs take them."""
        return self._store.view(self.group, segment)

    def replace_lost(self) -> None:
        """Put zeros in the place of extents that failed programs have taken along."""
        for extents in self.kv:
            extents[:] = replaced_if_lost(extents, self.group)

    def extents(self) -> Iterator[jax.Array]:
        """All of the cache."""
        for extents in self.kv:
            yield from extents
