"""Sizes of the GPU kernel: sizes by rule always fit, and tables of the tuner are used."""

import json
import math
from dataclasses import replace
from itertools import product

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import bench, tune, tuning
from pallas_kernels.paged_attention.layouts import PageLayout
from pallas_kernels.paged_attention.measure import Workload
from pallas_kernels.paged_attention.mosaic_gpu.support import HEAD_SIZES, PAGE_SIZES
from pallas_kernels.paged_attention.mosaic_gpu.variant import Variant
from pallas_kernels.paged_attention.tuning import KernelConfig, KernelShape, default_config, shared_bytes

DECODE = KernelShape(batch=8, kv_heads=8, head_dim=128, page_size=16, rows=4, kv_itemsize=2, max_tokens=32768)


class Device:
    """Device with the attributes that select sizes."""

    device_kind, core_count = "Test GPU 900", 100


def variant(shape: KernelShape, config: KernelConfig) -> Variant:
    """Return the kernel variant of a launch with these sizes."""
    half = jnp.dtype(jnp.float16)
    return Variant(
        batch=shape.batch,
        kv_heads=shape.kv_heads,
        tiles=1,
        head_dim=shape.head_dim,
        rows=64,
        page_size=shape.page_size,
        num_extents=1,
        splits=config.splits,
        block_tokens=config.block_tokens,
        stages=config.stages,
        warpgroups=config.warpgroups,
        split_keys=config.split_keys,
        thread_blocks=config.thread_blocks,
        scale=1.0,
        sliding_window=None,
        soft_cap=None,
        has_sinks=True,
        has_scales=False,
        dtype=half,
        kv_dtype=jnp.dtype(jnp.float8_e4m3fn) if shape.kv_itemsize == 1 else half,
        result_dtype=half,
        layout=PageLayout.HEADER_CENTRIC,
        interpret=False,
    )


def allocated_bytes(variant: Variant) -> int:
    """Return the bytes of shared memory of a kernel, without barriers."""
    refs = [ref for name, ref in variant.scratch().items() if not name.endswith(("_ready", "_free"))]
    return sum(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in refs)


def test_rule_gives_sizes_that_fit_for_everything_that_is_supported():
    for head_dim, page_size, itemsize, rows in product(HEAD_SIZES, PAGE_SIZES, (1, 2), (1, 64, 65, 8192)):
        shape = replace(DECODE, head_dim=head_dim, page_size=page_size, kv_itemsize=itemsize, rows=rows)
        config = default_config(shape)
        assert config.stages >= 2
        needed = shared_bytes(shape, config)
        assert allocated_bytes(variant(shape, config)) <= needed <= tuning.SHARED_BYTES


@pytest.mark.parametrize(
    ("changes", "splits"),
    [({}, 2), ({"batch": 64}, 1), ({"batch": 1}, 16), ({"batch": 1, "max_tokens": 512}, 2), ({"max_tokens": 16}, 1)],
)
def test_keys_are_split_where_sequences_and_heads_do_not_fill_the_device(changes, splits):
    assert default_config(replace(DECODE, **changes), processors=132).splits == splits


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((96, 2, 1, False, 1, 1), "block_tokens=96"),
        ((64, 2, 3, False, 1, 1), "warpgroups=3"),
        ((64, 3, 2, True, 1, 1), "stages=3"),
        ((64, 2, 1, False, 0, 1), "splits=0"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        KernelConfig(*sizes)


def test_tuner_writes_the_fastest_sizes_and_launches_use_them(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    wide = Workload(64, 4096, 1, kv_heads=8, group=4, head_dim=128, page_size=16)
    chunk = replace(wide, batch=1, queries=1024)
    wanted = {wide: KernelConfig(64, 3, 1, False, 4, 100), chunk: KernelConfig(128, 2, 1, False, 1, 100)}

    def time_s(workload: Workload, config: KernelConfig) -> float:
        names = ("block_tokens", "stages", "warpgroups", "splits")
        return 1e-3 + 1e-6 * sum(getattr(config, n) != getattr(wanted[workload], n) for n in names)

    path = tuning.table_path(Device.device_kind)
    assert path.name == "test_gpu_900.json"
    before = tuning.kernel_config(wide.kernel_shape(), Device())
    assert before == default_config(wide.kernel_shape(), 100)
    tune.tune(path, 100, [wide, chunk], time_s, {"device": "test"})
    assert json.loads(path.read_text())["about"] == {"device": "test"}
    for workload, config in wanted.items():
        assert tuning.kernel_config(workload.kernel_shape(), Device()) == config
    # Nearby shapes use the measured sizes, except the splits, which follow the amount of work. Other head sizes do not.
    smaller = replace(wide, batch=4).kernel_shape()
    assert tuning.kernel_config(smaller, Device()) == replace(wanted[wide], splits=3)
    other = replace(wide, head_dim=64).kernel_shape()
    assert tuning.kernel_config(other, Device()) == default_config(other, 100)


def test_candidates_of_the_tuner_fit_and_start_with_the_default():
    for shape in (DECODE, replace(DECODE, rows=4096), replace(DECODE, head_dim=256, kv_itemsize=1)):
        found = list(tune.candidates(shape, 132))
        assert found[0].block_tokens == default_config(shape).block_tokens
        assert default_config(shape) in found
        assert len(set(found)) == len(found) > 5
        assert all(shared_bytes(shape, config) <= tuning.SHARED_BYTES for config in found)


def test_tuner_says_that_there_is_nothing_to_tune_without_a_gpu(monkeypatch):
    monkeypatch.setattr("sys.argv", ["tune"])
    with pytest.raises(SystemExit, match="no Hopper GPU found"):
        tune.main()


@pytest.mark.first_by_default
@pytest.mark.parametrize(
    ("extents", "scattered"), [pytest.param(1, True, marks=pytest.mark.slow), (3, True), (3, False)]
)
def test_workloads_name_every_token_once(extents, scattered):
    workload = Workload(2, 100, 3, kv_heads=2, group=1, head_dim=8, page_size=16)
    queries, pool, tables, positions = workload.make(jnp.float32, extents=extents, scattered=scattered)
    assert queries.shape == (2, 3, 2, 8)
    assert len(pool) == extents
    assert positions.tolist() == [[97, 98, 99]] * 2
    for row in range(2):
        places = [p for t in tables for p in t.page_positions[row, : int(t.num_pages[row])].tolist()]
        assert sorted(places) == list(range(7))
        assert sum(int(t.num_pages[row]) > 0 for t in tables) == (extents if scattered else 1)


@pytest.mark.slow
def test_benchmark_measures_all_comparisons_of_a_cpu(tmp_path, capsys):
    file = tmp_path / "results.json"
    bench.main(["--quick", "--json", str(file)])
    printed = capsys.readouterr().out
    assert "does not run here" not in printed
    sections = {section["title"].split(":")[0]: section["rows"] for section in json.loads(file.read_text())["results"]}
    names = {title: {row["name"] for row in rows} for title, rows in sections.items()}
    assert names["Decode"] == {"xla", "gather everything", "dense contiguous cache", bench.MEMORY}
    assert {"1 extent", "13 extents", "raw order", "page_friendly order", "fp8 cache"} <= names["What variants cost"]
    assert len(names["Cache writes"]) == 4
    assert all(row["time_s"] > 0 and row["name"] in printed for rows in sections.values() for row in rows)
