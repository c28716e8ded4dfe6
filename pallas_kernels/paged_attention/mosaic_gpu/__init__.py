"""Paged attention for Hopper GPUs, in Pallas with the Mosaic GPU backend."""

from pallas_kernels.paged_attention.mosaic_gpu.launch import mosaic_gpu_paged_attention
from pallas_kernels.paged_attention.mosaic_gpu.support import unsupported

__all__ = ["mosaic_gpu_paged_attention", "unsupported"]
