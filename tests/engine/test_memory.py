"""Weights exist once per device, views share their buffers, and every byte has an owner."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_memory import live_bytes
from harness import engine_of
from tiny_models import tiny_config, tiny_model, write_model
from transform_cases import Background, after_each_switch, requests, wait_until_decoding

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.engine.reports import memory_report
from amoeba_jax.errors import ConfigError
from amoeba_jax.models.decoder import Segment
from amoeba_jax.programs.step_program import is_sharded, leaf_variables
from amoeba_jax.weights.loading import put, staging_bytes, staging_shards
from benchmarks.baselines.movers import baseline
from sharding.owners import Owner
from sharding.params import ParamSpec, Source

pytestmark = pytest.mark.usefixtures("quick_compile")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5]
# All tests share the settings, so they share compiled programs.
SETTINGS: dict[str, Any] = {
    "num_devices": 4,
    "device_memory": "32MiB",
    "kv_cache_tokens": 1024,
    "page_size": 8,
    "max_num_batched_tokens": 16,
    "segment_layers": 1,
    "progress": False,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny_model("qwen2", tmp_path)


@pytest.fixture
def llm(directory: Path, compile_cache: str) -> Iterator[LLM]:
    with LLM(directory, compile_cache=compile_cache, **SETTINGS) as llm:
        yield llm


def test_every_live_byte_has_an_owner_in_every_layout(directory: Path, compile_cache: str):
    before = live_bytes()
    with LLM(directory, compile_cache=compile_cache, **SETTINGS) as llm:
        for tp in (1, 2, 4, 1):
            llm.set_layout(tp)
            llm.generate([PROMPT], GREEDY)
            report, now = llm.memory(), live_bytes()
            for device in range(4):
                assert now[device] - before.get(device, 0) == report.device_bytes(device)
    assert live_bytes() == before, "close() leaves device buffers behind"


@pytest.mark.slow
def test_report_has_what_a_transformation_takes_on_its_devices_alone(
    directory: Path, compile_cache: str, monkeypatch: pytest.MonkeyPatch
):
    with LLM(directory, compile_cache=compile_cache, **SETTINGS) as llm:
        before, staging = llm.memory(), engine_of(llm).cluster.memory_plan.staging_bytes
        assert len(before.reserved_bytes) == 4
        reports = []
        after_each_switch(monkeypatch, lambda transition: reports.append(memory_report(engine_of(llm))))
        running = Background(llm, *requests(8, max_tokens=64))
        wait_until_decoding(llm, 8)
        with baseline("basic"):
            extra = llm.transform(2, devices=[2, 3], variant="in_place").extra_bytes
        running.result()
        assert extra > staging, "or there is nothing to see"
        assert reports
        for report in reports:
            taken = [now - then for now, then in zip(report.reserved_bytes, before.reserved_bytes, strict=True)]
            assert taken == [0, 0, extra - staging, extra - staging]
        assert llm.memory().reserved_bytes == before.reserved_bytes


def test_weights_exist_once_per_device(llm: LLM):
    """The weights have the bytes of one padded model. No layout adds a copy."""
    owners = llm.memory().by_owner(0)
    weights = sum(size for owner, size in owners.items() if owner not in ("kv cache", "sampling", "hidden states"))
    config = tiny_config("qwen2")
    hidden, ffn_shard, vocab_shard = 48, llm.dims.ffn_shard, llm.dims.vocab_shard
    heads = llm.dims.heads
    columns = heads.kv_heads * (heads.group + 2) * 12
    attention = hidden * columns + columns + heads.kv_heads * heads.group * 12 * hidden
    layer = attention + 3 * hidden * ffn_shard * 4 + 2 * hidden
    expected = config["num_hidden_layers"] * layer + hidden * vocab_shard * 4 + hidden
    assert weights == expected * 4


def test_views_share_the_tp1_buffers(llm: LLM):
    """Arrays at TP2 and TP4 have the pointers of the shards on each device, in order of rank."""
    store, pool = engine_of(llm).cluster.weights, engine_of(llm).cluster.sub_meshes
    plan = engine_of(llm).cluster.plan
    for tp, segment in itertools.product((1, 2, 4), (*plan.segments, plan.head)):
        for group in pool.groups(tp):
            variables = leaf_variables(Segment(llm.dims, segment, tp))
            for variable, array in zip(variables, store.view(group, segment), strict=True):
                metadata = variable.get_metadata()
                spec: ParamSpec = metadata["spec"]
                for rank, device in enumerate(group.device_indices):
                    shards = {shard.device: shard.data for shard in array.addressable_shards}
                    shard = metadata["shard"]
                    if is_sharded(variable):
                        shard = spec.shard_indices(tp, rank)[shard]
                    pointer = shards[group.devices[rank]].unsafe_buffer_pointer()
                    assert pointer == store.shard(device, spec.name, shard).unsafe_buffer_pointer()


@pytest.mark.slow
def test_layout_switch_keeps_the_kv_buffers(llm: LLM):
    """Switching and stepping never move the cache: its memory is the same from start to end."""

    def pointers() -> set[tuple[int, int]]:
        return {
            (shard.device.id, shard.data.unsafe_buffer_pointer())
            for instance in engine_of(llm).instances
            for extent in instance.site.extents()
            for shard in extent.addressable_shards
        }

    before = pointers()
    for tp in (2, 4, 1):
        llm.set_layout(tp)
        llm.generate([PROMPT, [7, 7]], GREEDY)
        assert pointers() > before if tp > 1 else pointers() == before, "released weights come and go"


def test_ffn_shards_are_extents_of_the_cache(llm: LLM):
    """A releasable shard has the row length and dtype of a KV extent."""
    store, kv = engine_of(llm).cluster.weights, engine_of(llm).instances[0].site.kv
    for name in ("layers.0.mlp.gate_up", "layers.1.mlp.down"):
        for index in range(4):
            shard = store.shard(0, name, index)
            assert shard.shape[1:] == kv[0][0].shape[1:]
            assert shard.dtype == kv[0][0].dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_buffers_belong_to_the_device(dtype: str):
    """A buffer that aliases host memory cannot be donated in place. JAX would alias an aligned array."""
    overwrite = jax.jit(lambda buffer: buffer.at[0, 0].set(1), donate_argnums=0)
    for rows in range(1, 40, 4):
        spec = ParamSpec("p", (Source("t", (rows, 1024)),), (rows, 1024), num_shards=1, owner=Owner.FFN)
        memory = np.zeros(staging_bytes(spec, jnp.dtype(dtype)), np.uint8)
        (shard,) = staging_shards(spec, jnp.dtype(dtype), memory)
        for buffer in put([shard], [jax.devices()[:2]])[0]:
            pointer = buffer.unsafe_buffer_pointer()
            assert pointer != shard.ctypes.data
            assert overwrite(buffer).unsafe_buffer_pointer() == pointer
        assert not shard.any()


@pytest.mark.slow
def test_attention_shards_are_extents_if_asked(directory: Path, compile_cache: str):
    outputs = []
    for transform_attention in (False, True):
        settings = SETTINGS | {"transform_attention": transform_attention}
        with LLM(directory, compile_cache=compile_cache, **settings) as llm:
            shard = engine_of(llm).cluster.weights.shard(1, "layers.0.attention.qkv", 2)
            assert (shard.shape[1] == llm.dims.pages.page_elems) == transform_attention
            outputs.append(llm.logits(PROMPT))
            llm.set_layout(4)
            np.testing.assert_allclose(llm.logits(PROMPT), outputs[0], atol=1e-5)
    np.testing.assert_array_equal(*outputs)


# On CPU, XLA of JAX 0.10 and 0.11 copies whole KV extents of bfloat16 in every step.
OLD_JAX = jax.__version_info__ < (0, 12)


@pytest.mark.parametrize(
    "dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.skipif(OLD_JAX, reason="refused on CPU"))]
)
def test_dtype_is_that_of_all_buffers(directory: Path, compile_cache: str, dtype: str):
    with LLM(directory, dtype=dtype, device_memory="32MiB", compile_cache=compile_cache, progress=False) as llm:
        assert engine_of(llm).instances[0].site.kv[0][0].dtype == jnp.dtype(dtype)
        assert engine_of(llm).cluster.weights.shard(0, "head", 0).dtype == jnp.dtype(dtype)
        assert np.isfinite(llm.logits(PROMPT)).all()


def test_plan_counts_the_copies_that_xla_makes_of_small_weights_on_cpu(tmp_path: Path, compile_cache: str):
    """XLA makes a float32 copy of a head of 1.4 million float16 elements. The cache must leave memory for it."""
    model = write_model(tiny_config("smollm2") | {"vocab_size": 20_000}, tmp_path / "model")
    few = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "device_memory": "16MiB"}
    with LLM(model, dtype="float16", compile_cache=compile_cache, compile_beside=True, progress=False, **few) as llm:
        assert len(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids) == 4
        assert max(program.temp_bytes for program in llm.executables()) > 4 * 72 * 20_000


@pytest.mark.skipif(not OLD_JAX, reason="works with this JAX")
@pytest.mark.parametrize("num_devices", [1, 4])
def test_dtype_that_copies_the_cache_in_every_step_is_refused_at_start(directory: Path, num_devices: int):
    with pytest.raises(ConfigError, match=r"dtype='bfloat16' does not work on CPU .* use dtype='float32', or"):
        LLM(directory, dtype="bfloat16", num_devices=num_devices, device_memory="32MiB", progress=False)


@pytest.mark.slow
def test_saved_checkpoint_loads_in_the_same_and_in_other_layouts(directory: Path, tmp_path: Path, compile_cache: str):
    settings = {"device_memory": "32MiB", "compile_cache": compile_cache, "progress": False}
    with LLM(directory, num_devices=4, page_size=8, **settings) as llm:
        llm.save(tmp_path / "saved")
        expected = llm.logits(PROMPT)
    with LLM(tmp_path / "saved", num_devices=4, page_size=8, **settings) as llm:
        np.testing.assert_array_equal(llm.logits(PROMPT), expected)
    with LLM(tmp_path / "saved", num_devices=1, page_size=16, **settings) as llm:
        np.testing.assert_allclose(llm.logits(PROMPT), expected, atol=1e-5)
