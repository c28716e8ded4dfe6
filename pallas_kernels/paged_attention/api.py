"""Paged attention over header-centric extents: one signature, several implementations."""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention.base import PageTable, check_arguments, reference_paged_attention
from pallas_kernels.paged_attention.xla import xla_paged_attention

Implementation = Literal["auto", "xla", "reference"]
_IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "xla": xla_paged_attention,
    "reference": reference_paged_attention,
}


def paged_attention(
    queries: Float[Array, "B T H h"],
    extents: Sequence[Float[Array, "_ K 2 S h"]],
    tables: Sequence[PageTable],
    query_positions: Int32[Array, "B T"],
    *,
    scale: float,
    sliding_window: int | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B T H h"]:
    """Causal attention of new tokens over the paged cache, which already holds their own keys and values.

    Decode is T = 1; a chunk of prefill is T > 1. Query head i uses KV head `i // (H // K)`.

    Args:
        queries: after rotary embedding.
        extents: pages `[pages, K, 2, S, h]` (header-centric; index 0 keys, 1 values), one array per extent.
        tables: for each extent, the pages in use and their logical positions.
        query_positions: position of each query in its sequence; -1 marks padding, whose output is zero.
        scale: factor on the scores, usually `h ** -0.5`.
        sliding_window: if set, a query sees only the last `sliding_window` positions, its own included.
        implementation: `auto` picks by device; the others force one.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an unknown implementation.
    """
    check_arguments(queries, extents, tables, query_positions)
    if implementation not in ("auto", *_IMPLEMENTATIONS):
        raise ValueError(f"implementation={implementation!r} must be one of {('auto', *_IMPLEMENTATIONS)}")
    function = _IMPLEMENTATIONS["xla" if implementation == "auto" else implementation]
    return function(queries, extents, tables, query_positions, scale=scale, sliding_window=sliding_window)
