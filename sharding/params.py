"""Descriptions of model parameters. Loading, initialization and sharding are based on them."""

import itertools
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Literal

import jax
import numpy as np
from jaxtyping import Int32

from sharding.errors import LayoutError
from sharding.owners import Owner

ReadTensor = Callable[[str], np.ndarray]


def expand_rows(blocks: Int32[np.ndarray, "..."], size: int) -> Int32[np.ndarray, "..."]:
    """Convert indices of blocks (such as heads) to indices of their rows, along the last axis.

    Block `b` becomes the rows `range(b * size, (b + 1) * size)`. A block -1 becomes `size` rows -1.
    """
    rows = np.where(blocks[..., None] < 0, -1, blocks[..., None] * size + np.arange(size))
    return rows.reshape(*blocks.shape[:-1], -1).astype(np.int32)


def deal_rows(total: int, num_shards: int, shard_rows: int) -> Int32[np.ndarray, "shards rows"]:
    """Distribute `total` rows evenly and in order over shards with `shard_rows` positions each.

    Return the index of the row at each position of each shard, or -1 for a position without a row (zero padding).

    Raises `LayoutError` if the rows do not fit.
    """
    share = -(-total // num_shards)
    if share > shard_rows:
        raise LayoutError(f"{total} rows do not fit {num_shards} shards of {shard_rows}")
    rows = np.arange(num_shards)[:, None] * share + np.arange(shard_rows)[None, :]
    valid = (np.arange(shard_rows)[None, :] < share) & (rows < total)
    return np.where(valid, rows, -1).astype(np.int32)


def round_up_to_pages(size: int, row_elems: tuple[int, ...], page_elems: int) -> int:
    """Return the smallest number of rows, at least `size`, that fills whole pages in each of several tensors.

    `row_elems` has the number of elements of a row in each tensor. `page_elems` is the number of elements of a page.
    """
    step = math.lcm(*(page_elems // math.gcd(r, page_elems) for r in row_elems))
    return -(-size // step) * step


@dataclass(frozen=True, eq=False)
class Source:
    """Tensor of a checkpoint, and its distribution over the shards of a parameter.

    Attributes:
        name: name in the checkpoint.
        shape: shape in the checkpoint; matrices are `[out, in]`.
        rows: rows of the tensor that each shard gets. A row is a slice at one index along `axis`. Position i of shard c
            gets row `rows[c, i]`, or zeros if `rows[c, i]` is -1. None: every shard has the whole tensor.
        axis: axis of the tensor that is split over the shards.
        blocks: index of this tensor in each shard, if a shard is a stack of tensors, such as the matrices of several
            experts. `blocks[c]` is None if shard c does not have this tensor. Default: shards are not stacks.
        start: index along `axis` in a shard at which the rows of this tensor begin. None: after the rows of the
            previous source.
    """

    name: str
    shape: tuple[int, ...]
    rows: Int32[np.ndarray, "shards rows"] | None = None
    axis: int = 0
    blocks: tuple[int | None, ...] | None = None
    start: int | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows along `axis` that this tensor has in a shard, including padding."""
        return self.shape[self.axis] if self.rows is None else self.rows.shape[1]


@dataclass(frozen=True, eq=False)
class ParamSpec:
    """Description of a parameter: its checkpoint tensors, its shards, and its storage on devices.

    The tensor-parallel degree p decides with which shards rank r computes (`shard_indices`):

    * `replicated` parameter: every rank computes with all shards.
    * `sharded` parameter: rank r computes with `max_tp / p` consecutive shards,
      `range(r * max_tp // p, (r + 1) * max_tp // p)`.
    * `sharded` parameter with `strided`: rank r computes with every p-th shard, `range(r, max_tp, p)`. The shards that
      a device needs at a higher degree are then a subset of the shards that it needs at a lower degree. A merge
      therefore moves no weights.

    At start-up, a device loads all shards, because it must be able to serve alone at degree 1. If the engine starts
    with a placement (devices for each layer), a device loads only the shards that its layers use
    (`weights.layout.WeightLayout.shards_at`).

    Attributes:
        kind: name of the parameter, such as `mlp.gate_up`. It is unique in a layer.
        sources: checkpoint tensors. A shard has their rows one after another, or is a stack (`Source.blocks`).
        shard_shape: shape of one shard in computations. Matrices are `[out, in]`, as in checkpoints.
        num_shards: `max_tp` for sharded parameters, 1 for replicated parameters.
        placement: `sharded` or `replicated`, see above.
        page_elems: elements of a KV page. If set, a shard is stored as `[pages, page_elems]`, so that its buffer can
            become KV cache.
        min_pages: smallest number of pages of a stored shard. A shard with fewer pages is padded with zeros, so that
            the buffers of all kinds of layers have the same size.
        init: distribution of random weights.
        strided: whether a rank computes with every p-th shard, see above. Allowed only if the results of all shards are
            added, because then the order of the shards does not matter.
        owner: use of the bytes in the memory ledger, such as FFN weights.
        layer: index of the layer; None for the embedding, the final norm and the output projection.
    """

    kind: str
    sources: tuple[Source, ...]
    shard_shape: tuple[int, ...]
    num_shards: int = 1
    placement: Literal["sharded", "replicated"] = "replicated"
    page_elems: int | None = None
    init: Literal["normal", "ones", "zeros"] = "normal"
    strided: bool = False
    _: KW_ONLY
    owner: Owner
    layer: int | None = None
    min_pages: int = 0

    @cached_property
    def name(self) -> str:
        """Unique name within the model, such as `layers.3.mlp.gate_up`."""
        return self.kind if self.layer is None else f"layers.{self.layer}.{self.kind}"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the device buffer of one shard: `shard_shape`, or `[pages, page_elems]` if `page_elems` is set."""
        if self.page_elems is None:
            return self.shard_shape
        pages, rest = divmod(math.prod(self.shard_shape), self.page_elems)
        assert rest == 0, f"{self.name}: shard {self.shard_shape} is not whole pages of {self.page_elems}"
        return (max(pages, self.min_pages), self.page_elems)

    @property
    def num_elements(self) -> int:
        """Number of elements of all shards together, including padding."""
        return self.num_shards * math.prod(self.stored_shape)

    def num_bytes(self, dtype: jax.typing.DTypeLike) -> int:
        """Return the bytes of all shards together, including padding."""
        return self.num_elements * jax.numpy.dtype(dtype).itemsize

    @property
    def model_elements(self) -> int:
        """Number of elements of the checkpoint tensors, without padding and copies."""
        return sum(math.prod(source.shape) for source in self.sources)

    def shard_indices(self, tp: int, rank: int) -> range:
        """Return the indices of the shards that `rank` computes with at tensor-parallel degree `tp`."""
        if self.placement == "replicated":
            return range(self.num_shards)
        if self.strided:
            return range(rank, self.num_shards, tp)
        per_rank = self.num_shards // tp
        return range(rank * per_rank, (rank + 1) * per_rank)

    def local_shards(self, tp: int) -> int:
        """Return the number of shards that each rank computes with at tensor-parallel degree `tp`."""
        return len(self.shard_indices(tp, 0))

    def abstract(self, dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of one shard in computations, as a `jax.ShapeDtypeStruct`."""
        return jax.ShapeDtypeStruct(self.shard_shape, dtype)

    def fill_shards(self, read: ReadTensor, shards: list[np.ndarray]) -> None:
        """Fill all shards of this parameter from checkpoint tensors, and the padding with zeros.

        Args:
            read: function that returns the checkpoint tensor with a given name.
            shards: arrays to fill: one contiguous array of `stored_shape` for each shard.
        """
        outs = [self._computed(shard) for shard in shards]
        for shard in shards:  # pages after the shard
            shard.reshape(-1)[math.prod(self.shard_shape) :] = 0
        if any(source.blocks is not None and len(source.shape) == 1 for source in self.sources):
            for out in outs:  # a bias of experts is in one shard, also if the shards divide each expert
                out[...] = 0
        end, axis = 0, 0
        for source, start in self._placed_sources():
            tensor, axis = read(source.name), source.axis
            for index, out in enumerate(outs):
                if (part := self._part(source, index, out)) is not None:
                    self._fill(source, tensor, index, part, start)
            end = start + source.num_rows
        if self.sources[-1].blocks is None:
            for out in outs:
                out[(slice(None),) * axis + (slice(end, None),)] = 0

    def restore_tensor(self, source: Source, shards: list[np.ndarray]) -> np.ndarray:
        """Rebuild the checkpoint tensor of `source` from all shards of this parameter.

        This is the inverse of `fill_shards`. Each shard has the shape `stored_shape`.
        """
        start = next(start for other, start in self._placed_sources() if other is source)
        out = np.zeros(source.shape, shards[0].dtype)
        for index, stored in enumerate(shards):
            if (local := self._part(source, index, self._computed(stored))) is None:
                continue
            rows = np.arange(source.shape[source.axis]) if source.rows is None else source.rows[index]
            valid = rows >= 0
            part = np.take(local, start + np.nonzero(valid)[0], axis=source.axis)
            out[(slice(None),) * source.axis + (rows[valid],)] = part
        return out

    def _computed(self, shard: np.ndarray) -> np.ndarray:
        """Return a view of a stored shard, in the shape that computations use."""
        return shard.reshape(-1)[: math.prod(self.shard_shape)].reshape(self.shard_shape)

    def _placed_sources(self) -> list[tuple[Source, int]]:
        """Return `(source, index)` for each checkpoint tensor. `index` is the index of its first row in a shard."""
        placed, position = [], 0
        for source in self.sources:
            position = position if source.start is None else source.start
            placed.append((source, position))
            position += source.num_rows
        return placed

    @staticmethod
    def _part(source: Source, index: int, shard: np.ndarray) -> np.ndarray | None:
        """Return the part of a shard that a checkpoint tensor fills, or None if it fills no part."""
        if source.blocks is None:
            return shard
        return None if (block := source.blocks[index]) is None else shard[block]

    def _fill(self, source: Source, tensor: np.ndarray, shard: int, out: np.ndarray, position: int) -> None:
        if source.rows is None:
            out[(slice(None),) * source.axis + (slice(position, position + tensor.shape[source.axis]),)] = tensor
            return
        rows = source.rows[shard]
        for start, stop in _runs(rows):
            window = (slice(None),) * source.axis
            target = (*window, slice(position + start, position + stop))
            if rows[start] < 0:
                out[target] = 0
            else:
                out[target] = tensor[(*window, slice(rows[start], rows[start] + stop - start))]


def _runs(rows: Int32[np.ndarray, " rows"]) -> list[tuple[int, int]]:
    """Split an array of row indices into ranges of positions, so that one slice can copy each range.

    The rows of a range are consecutive, or all of them are padding. A range is `(start, stop)`, without position
    `stop`. Copies by slices are faster than a gather.
    """
    step = np.diff(rows)
    both_padding = (rows[1:] < 0) & (rows[:-1] < 0)
    consecutive = (step == 1) & (rows[:-1] >= 0)
    breaks = np.nonzero(~(both_padding | consecutive))[0] + 1
    edges = [0, *breaks.tolist(), len(rows)]
    return list(itertools.pairwise(edges))
