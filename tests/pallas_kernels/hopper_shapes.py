"""Calls that the Hopper kernel supports, with every feature at least once, and sizes to run it with."""

from dataclasses import replace

from attention_cases import Shape

from pallas_kernels.paged_attention import PageLayout
from pallas_kernels.paged_attention.mosaic_gpu.support import HEAD_SIZES, PAGE_SIZES
from pallas_kernels.paged_attention.tuning import KernelConfig

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
DECODE = KernelConfig(block_tokens=64, stages=4, warpgroups=2, split_keys=True, splits=2, thread_blocks=3)
ONE_GROUP = KernelConfig(block_tokens=64, stages=2, warpgroups=1, split_keys=False, splits=1, thread_blocks=2)
PREFILL = KernelConfig(block_tokens=64, stages=2, warpgroups=2, split_keys=False, splits=1, thread_blocks=2)
BASE = Shape(B=3, T=1, K=2, G=4, h=128, page_size=16, width=40, extents=1, window=None, dtype="bfloat16")
CHUNK = replace(BASE, B=1, T=200)
SHAPES = {
    **{f"{n} elements a head": replace(BASE, h=n) for n in HEAD_SIZES},
    **{f"chunk, {n} elements a head": replace(CHUNK, h=n) for n in HEAD_SIZES},
    **{f"fp8, {n} elements a head": replace(BASE, h=n, kv_dtype=E4M3) for n in HEAD_SIZES},
    **{f"fp8 chunk, {n} elements a head": replace(CHUNK, h=n, kv_dtype=E5M2) for n in (80, 256)},
    **{f"{n} tokens a page": replace(BASE, page_size=n, h=64) for n in PAGE_SIZES if n != 16},
    **{f"{order.name}": replace(BASE, layout=order, h=64) for order in (PageLayout.PAGE_FRIENDLY, PageLayout.RAW)},
    "chunk of pages of 8 tokens": replace(CHUNK, page_size=8, h=64),
    "chunk of 13 extents, everything": replace(CHUNK, extents=13, window=64, soft_cap=30.0, sinks=True),
    "everything": replace(BASE, window=64, soft_cap=30.0, sinks=True, kv_dtype=E4M3, extents=2),
    "one query head for each KV head": replace(BASE, G=1, dtype="float16"),
    "seven query heads for each KV head": replace(CHUNK, G=7, dtype="float16"),
}
CONFIGS = (DECODE, ONE_GROUP, PREFILL, replace(ONE_GROUP, splits=4), replace(PREFILL, splits=2, block_tokens=128))
