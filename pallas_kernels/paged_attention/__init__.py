"""Paged attention over the header-centric KV cache."""

from pallas_kernels.paged_attention.api import Implementation, paged_attention
from pallas_kernels.paged_attention.base import PageTable, reference_paged_attention

__all__ = ["Implementation", "PageTable", "paged_attention", "reference_paged_attention"]
