"""Paged attention over the header-centric KV cache."""

from pallas_kernels.paged_attention.api import Implementation, paged_attention
from pallas_kernels.paged_attention.base import Options, PageTable, reference_paged_attention
from pallas_kernels.paged_attention.layouts import PageLayout

__all__ = ["Implementation", "Options", "PageLayout", "PageTable", "paged_attention", "reference_paged_attention"]
