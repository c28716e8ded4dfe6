"""What the Mosaic GPU kernel can compute."""

from collections.abc import Sequence

import jax

from pallas_kernels.paged_attention.base import Options
from pallas_kernels.paged_attention.layouts import PageLayout

HEAD_SIZES = (64, 80, 96, 128, 256)
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
MAX_EXTENTS = 16


def unsupported(queries: jax.Array, extents: Sequence[jax.Array], options: Options) -> str | None:
    """Why the kernel cannot compute a call that is otherwise well-formed, or None if it can.

    Looks at shapes and dtypes only, not at the device.
    """
    page_size = PageLayout.of(options.stride_order).logical_shape(extents[0].shape)[3]
    if queries.dtype.name not in ("bfloat16", "float16"):
        return f"queries are {queries.dtype}, and tensor cores multiply f32 only after rounding it to 10 bits (tf32)"
    if queries.shape[3] not in HEAD_SIZES:
        return f"head size {queries.shape[3]} is none of {HEAD_SIZES}"
    if page_size not in PAGE_SIZES:
        return f"page size {page_size} is none of {PAGE_SIZES}: shared memory is tiled by 8 tokens"
    if len(extents) > MAX_EXTENTS:
        return f"{len(extents)} extents are more than {MAX_EXTENTS}"
    return None
