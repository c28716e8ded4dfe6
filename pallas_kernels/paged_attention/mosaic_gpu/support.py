"""Check whether the Mosaic GPU kernel supports a call."""

from collections.abc import Sequence

import jax

from pallas_kernels.paged_attention.base import Options
from pallas_kernels.paged_attention.layouts import PageLayout

HEAD_SIZES = (64, 80, 96, 128, 256)
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
MAX_EXTENTS = 16


def unsupported(queries: jax.Array, extents: Sequence[jax.Array], options: Options) -> str | None:
    """Return the reason why the kernel does not support a valid call, or None if it supports the call.

    The result depends on shapes, dtypes and options, not on the device.
    """
    page_size = PageLayout.of(options.stride_order).logical_shape(extents[0].shape)[3]
    if queries.dtype.name not in ("bfloat16", "float16"):
        return f"queries are {queries.dtype}, and tensor cores round f32 to 10 bits of mantissa (tf32)"
    if queries.shape[3] not in HEAD_SIZES:
        return f"head size {queries.shape[3]} must be one of {HEAD_SIZES}"
    if page_size not in PAGE_SIZES:
        return f"page size {page_size} must be one of {PAGE_SIZES}: shared memory is tiled by 8 tokens"
    if len(extents) > MAX_EXTENTS:
        return f"{len(extents)} extents exceed the maximum of {MAX_EXTENTS}"
    return None
