"""Paged attention over one or several KV buffers. One function chooses between several implementations."""

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import jax
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.paged_attention.base import Options, PageTable, reference_paged_attention
from pallas_kernels.paged_attention.checks import check_arguments, checked_tables
from pallas_kernels.paged_attention.layouts import PageLayout
from pallas_kernels.paged_attention.mosaic_gpu.support import unsupported
from pallas_kernels.paged_attention.tuning import gpu_device
from pallas_kernels.paged_attention.xla import xla_paged_attention

logger = logging.getLogger(__name__)

Implementation = Literal["auto", "mosaic_gpu", "xla", "reference"]


def _mosaic_gpu_paged_attention(*args: Any, **kwargs: Any) -> jax.Array:
    """Call the GPU kernel. The kernel's module is imported here, because importing Mosaic takes long."""
    from pallas_kernels.paged_attention.mosaic_gpu import mosaic_gpu_paged_attention

    return mosaic_gpu_paged_attention(*args, **kwargs)


_IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "mosaic_gpu": _mosaic_gpu_paged_attention,
    "xla": xla_paged_attention,
    "reference": reference_paged_attention,
}


def paged_attention(
    queries: Float[Array, "B T H h"],
    extents: Sequence[Shaped[Array, "_ _ _ _ h"]],
    tables: Sequence[PageTable],
    query_positions: Int32[Array, "B T"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    kv_scales: Float[Array, "2 K"] | None = None,
    stride_order: tuple[int, ...] = PageLayout.HEADER_CENTRIC.value,
    implementation: Implementation = "auto",
    debug: bool = False,
) -> Float[Array, "B T H h"]:
    """Compute causal attention of new tokens over the paged cache.

    The cache must already hold the keys and values of the new tokens. T is the number of new tokens of each sequence: 1
    for a decode, more for a chunk of a prompt. Query head i uses KV head `i // (H // K)`. Sums are in f32.

    Args:
        queries: queries after rotary embedding; f32, bf16 or f16.
        extents: KV buffers (extents) of pages. The logical axes are `[pages, K, 2, S, h]`, with keys at index 0 and
            values at index 1 of axis 2. The dtype is the dtype of the queries, or fp8 (e4m3fn, e5m2).
        tables: for each extent: the pages of each sequence in this extent, with their positions in the sequence.
        query_positions: position of each query in its sequence. -1 marks padding, whose output is zero.
        scale: factor on the scores, usually `h ** -0.5`.
        sliding_window: number of positions that a query sees, including its own. None: no limit.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`. None: unchanged.
        sinks: one extra score for each query head: part of the softmax, but without a value.
        kv_scales: factors on the stored keys (row 0) and values (row 1) of each KV head.
        stride_order: permutation that transposes an extent to its logical axes: the value of a `PageLayout`.
        implementation: implementation to use. `auto` chooses `mosaic_gpu` on a Hopper GPU if this kernel supports the
            call, and `xla` in all other cases. If `auto` chooses `xla` on a GPU, the reason is logged.
        debug: whether to check the contents of the tables too, on the host. This is slow.

    Raises:
        ValueError: shapes, dtypes or options do not fit together, the implementation is unknown, or `mosaic_gpu` is
            given and does not support the call. With `debug`, also: a page is out of range, or a position occurs twice.
            Inside `jit`, JAX raises a run-time error in these two cases.
    """
    options = Options(scale, sliding_window, soft_cap, sinks, kv_scales, tuple(stride_order))
    check_arguments(queries, extents, tables, query_positions, options)
    if implementation not in ("auto", *_IMPLEMENTATIONS):
        raise ValueError(f"implementation={implementation!r} must be one of {('auto', *_IMPLEMENTATIONS)}")
    if debug:
        layout = PageLayout.of(options.stride_order)
        pages = [layout.logical_shape(extent.shape)[0] for extent in extents]
        tables = checked_tables(tables, pages, query_positions)
    if implementation == "mosaic_gpu" and (reason := unsupported(queries, extents, options)):
        raise ValueError(f"implementation='mosaic_gpu' cannot compute this: {reason}")
    if implementation != "auto":
        return _IMPLEMENTATIONS[implementation](queries, extents, tables, query_positions, options)
    device = gpu_device()
    reason = _not_hopper(device) or unsupported(queries, extents, options)
    if reason is not None:
        if device is not None:
            _log_once(reason)
        return xla_paged_attention(queries, extents, tables, query_positions, options)
    # The program may still run on the host: a CPU mesh on a machine with a GPU.
    return lax.platform_dependent(
        queries,
        list(extents),
        list(tables),
        query_positions,
        cuda=partial(_mosaic_gpu_paged_attention, options=options),
        default=partial(xla_paged_attention, options=options),
    )


def _not_hopper(device: Any) -> str | None:
    """Return the reason why the GPU kernel does not run on a device, or None for a Hopper GPU."""
    capability = getattr(device, "compute_capability", "")
    if capability.startswith("9."):
        return None
    return f"it needs Hopper (compute capability 9); {getattr(device, 'device_kind', 'this device')} has {capability}"


@cache
def _log_once(reason: str) -> None:
    logger.info("paged attention runs in XLA on this GPU, without the kernel: %s", reason)
