"""Paged attention for Hopper GPUs, in Pallas with the Mosaic GPU backend."""

from typing import TYPE_CHECKING, Any

from pallas_kernels.paged_attention.mosaic_gpu.support import unsupported

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.mosaic_gpu.launch import mosaic_gpu_paged_attention

__all__ = ["mosaic_gpu_paged_attention", "unsupported"]


def __getattr__(name: str) -> Any:
    # Importing the kernel imports Mosaic, which takes a quarter of the import time of an engine: only on use.
    if name == "mosaic_gpu_paged_attention":
        from pallas_kernels.paged_attention.mosaic_gpu.launch import mosaic_gpu_paged_attention

        return mosaic_gpu_paged_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
