"""Paged attention over a KV cache whose pages store heads first (header-centric)."""

from pallas_kernels.paged_attention.api import Implementation, paged_attention
from pallas_kernels.paged_attention.base import Options, PageTable, reference_paged_attention
from pallas_kernels.paged_attention.layouts import PageLayout

__all__ = ["Implementation", "Options", "PageLayout", "PageTable", "paged_attention", "reference_paged_attention"]
