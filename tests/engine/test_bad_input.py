"""Bad input raises an error that names the value and the limit. It affects nothing else."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_config, tiny_model, write_model

from amoeba_jax import LLM, EngineConfig, SamplingParams
from amoeba_jax.errors import (
    CheckpointError,
    ConfigError,
    LayoutError,
    MemoryBudgetError,
    ModelNotFoundError,
    RequestError,
)
from amoeba_jax.shorten import shorten

pytestmark = pytest.mark.usefixtures("quick_compile")

SETTINGS = {"device_memory": "16MiB", "progress": False, "compile_cache": ""}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny_model("llama2", tmp_path)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    directory = tiny_model("llama2", tmp_path_factory.mktemp("models"))
    settings = SETTINGS | {"compile_cache": compile_cache, "max_num_batched_tokens": 16}
    with LLM(directory, num_devices=2, **settings) as llm:
        yield llm


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_devices": 3}, ["num_devices=3", "a power of two", "64"]),
        ({"num_devices": 0}, ["num_devices=0"]),
        ({"tensor_parallel_size": 2}, ["tensor_parallel_size=2", "num_devices=1"]),
        ({"num_devices": 4, "tensor_parallel_size": 3}, ["tensor_parallel_size=3", "[1, 2, 4]"]),
        (
            {"num_devices": 4, "max_tensor_parallel_size": 2, "tensor_parallel_size": 4},
            ["tensor_parallel_size=4"],
        ),
        ({"max_tensor_parallel_size": 4}, ["max_tensor_parallel_size=4", "num_devices=1"]),
        ({"page_size": 24}, ["page_size=24", "power of two"]),
        ({"page_size": 0}, ["page_size=0"]),
        ({"page_size": 512}, ["page_size=512", "256"]),
        ({"dtype": "int8"}, ["dtype='int8'", "bfloat16"]),
        ({"max_num_seqs": 12}, ["max_num_seqs=12", "power of two"]),
        ({"max_num_batched_tokens": 100}, ["max_num_batched_tokens=100"]),
        ({"memory_utilization": 1.5}, ["memory_utilization=1.5"]),
        ({"memory_utilization": None}, ["memory_utilization=None", "(0, 1]"]),
        ({"memory_utilization": "0.5"}, ["memory_utilization='0.5'", "(0, 1]"]),
        ({"seed": 1.5}, ["seed=1.5", "[0, 2**64)"]),
        ({"seed": -1}, ["seed=-1", "[0, 2**64)"]),
        ({"seed": None}, ["seed=None"]),
        ({"seed": 2**64}, [f"seed={2**64}"]),
        ({"revision": ""}, ["revision=''", "branch"]),
        ({"max_model_len": 0}, ["max_model_len=0"]),
        ({"segment_layers": -1}, ["segment_layers=-1"]),
        ({"num_gpus": 1}, ["'num_gpus'", "num_devices"]),
    ],
)
def test_settings_out_of_range_are_named(settings: dict, words: list[str]):
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_fields(settings)
    for word in words:
        assert word in str(error.value)


def test_unknown_model_lists_what_is_accepted():
    with pytest.raises(ModelNotFoundError, match=r"no-such-model.*smollm2-135m"):
        LLM("no-such-model", **SETTINGS)


def test_budget_below_the_weights_says_how_much_is_needed(directory: Path):
    with pytest.raises(MemoryBudgetError) as error:
        LLM(directory, **SETTINGS | {"device_memory": "64KiB"})
    needed = int(str(error.value).split("(")[1].split(" bytes")[0])
    assert "64.0 KiB" in str(error.value)
    with LLM(directory, **SETTINGS | {"device_memory": needed}) as llm:
        assert llm.instances[0].kv_total_pages == 1
    with pytest.raises(MemoryBudgetError):
        LLM(directory, **SETTINGS | {"device_memory": needed - 1})


def test_device_with_less_memory_than_the_budget(directory: Path, monkeypatch: pytest.MonkeyPatch):
    """For example, other programs use the device too.

    JAX allocates arrays asynchronously. The engine reports the error when it starts, not with its first step.
    """
    from amoeba_jax.instances import cluster

    def awaited(arrays: Any) -> Any:
        raise jax.errors.JaxRuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "jax", SimpleNamespace(**vars(jax) | {"block_until_ready": awaited}))
        message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate"
        with pytest.raises(MemoryBudgetError, match=r"could not allocate .* within a budget of 16\.0 MiB"):
            LLM(directory, **SETTINGS)
        message = "INTERNAL: something else"
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: something else"):
            LLM(directory, **SETTINGS)
    with LLM(directory, **SETTINGS) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("size", ["lots", "-1GiB", "2 parsec"])
def test_memory_size_that_is_no_size(directory: Path, size: str):
    with pytest.raises(MemoryBudgetError, match="not a memory size"):
        LLM(directory, **SETTINGS | {"device_memory": size})


def test_context_beyond_the_models_is_refused(directory: Path):
    with pytest.raises(ConfigError, match=r"max_model_len=257 is above .* 256 .*max_position_embeddings=256"):
        LLM(directory, **SETTINGS | {"max_model_len": 257})
    with LLM(directory, **SETTINGS | {"max_model_len": 256}) as llm:
        assert llm.max_model_len == 256


def test_truncated_weights(directory: Path):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(directory, **SETTINGS)


def test_header_that_lies_about_its_length(directory: Path):
    file = directory / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", 1 << 40) + content[8:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(directory, **SETTINGS)


def test_missing_tensor_is_named(directory: Path):
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        LLM(directory, **SETTINGS)


def test_missing_weights(directory: Path):
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM(directory, **SETTINGS)


def test_config_that_disagrees_with_the_weights(directory: Path):
    config = tiny_config("llama2") | {"intermediate_size": 128}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"\(48, 116\).*\(48, 128\).*disagree"):
        LLM(directory, **SETTINGS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "model_type='mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type='dynamic'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ],
)
def test_config_that_is_not_supported(tmp_path: Path, change: dict, words: str):
    directory = write_model(tiny_config("llama2"), tmp_path / "model")
    (directory / "config.json").write_text(json.dumps(tiny_config("llama2") | change))
    with pytest.raises(CheckpointError, match=words):
        LLM(directory, **SETTINGS)


@pytest.mark.parametrize("token", [211, -1, 10**12, "7", 3.5, None])
def test_token_outside_the_vocabulary(llm: LLM, token: object):
    with pytest.raises(RequestError, match=rf"token id {token!r} at position 1.*\[0, 211\)"):
        llm.generate([[1, token]])


def test_empty_prompt(llm: LLM):
    with pytest.raises(RequestError, match="empty"):
        llm.generate([[]])


def test_text_without_a_tokenizer(llm: LLM):
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        llm.generate("hello")


def test_prompt_over_the_context_names_the_limit(llm: LLM):
    with pytest.raises(RequestError, match=r"prompt of 250 tokens plus max_tokens=10 is 260 tokens.*limit of 256"):
        llm.generate([[1] * 250], SamplingParams(max_tokens=10))


def test_prompt_over_the_cache_names_the_limit(directory: Path):
    settings = SETTINGS | {"max_num_batched_tokens": 16, "max_num_seqs": 1, "device_memory": "700KiB"}
    with LLM(directory, num_devices=2, **settings) as llm:
        capacity = llm.instances[0].kv_total_pages * 16
        assert 16 <= capacity < 128, "the test wants a cache smaller than the context"
        with pytest.raises(RequestError, match=f"KV cache of a TP1 instance holds {capacity}"):
            llm.generate([[1] * capacity], SamplingParams(max_tokens=1))
        llm.set_layout(2)
        prompt = [1] * capacity
        output = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        assert len(output[0].outputs[0].token_ids) == 1, "two devices hold what one could not"


@pytest.mark.parametrize("tp", [3, 4, 0])
def test_layout_that_cannot_be(llm: LLM, tp: int):
    with pytest.raises(LayoutError, match=rf"tensor_parallel_size={tp}.*\(1, 2\)"):
        llm.set_layout(tp)
    assert llm.instances[0].tensor_parallel_size == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"top_k": 2**31},
        {"temperature": 10**400},
        {"temperature": "warm"},
        {"max_tokens": 2.0},
        {"min_p": -0.1},
        {"min_p": 2},
        {"seed": -1},
        {"seed": 2**32},
        {"max_tokens": 0},
        {"stop_token_ids": (-5,)},
    ],
)
def test_sampling_settings_out_of_range(settings: dict):
    ((name, value),) = settings.items()
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams(**settings)
    assert shorten(value) in str(error.value)


def test_engine_serves_on_after_bad_requests(llm: LLM):
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    before = llm.generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids
    for bad in ([[999]], [[]], [[1] * 400]):
        with pytest.raises(RequestError):
            llm.generate(bad, greedy)
        good, failed = llm.generate([[5, 6, 7], *bad], greedy)
        assert (good.error, good.outputs[0].token_ids) == (None, before)
        assert failed.error is not None
        assert not failed.outputs
    assert llm.generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids == before
    assert all(i.kv_used_pages == 0 and i.running == 0 for i in llm.instances)


def test_closed_engine_says_so(directory: Path):
    llm = LLM(directory, **SETTINGS)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]])
    with pytest.raises(RuntimeError, match="closed"):
        llm.memory()


def test_numpy_token_ids_are_tokens(llm: LLM):
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    as_list = llm.generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids
    assert llm.generate([list(np.array([5, 6, 7]))], greedy)[0].outputs[0].token_ids == as_list


@pytest.mark.parametrize("prompt", [None, {"prompt": "x"}, 1.5])
def test_prompt_of_a_wrong_kind_is_named(llm: LLM, prompt: object):
    with pytest.raises(RequestError, match=type(prompt).__name__):
        llm.generate([prompt])


def test_numpy_scalars_are_sampling_settings():
    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(5), seed=np.uint32(7), stop_token_ids=None)


@pytest.fixture
def saved(directory: Path, tmp_path: Path) -> Path:
    with LLM(directory, **SETTINGS) as llm:
        llm.save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("change", [{"vocab_size": 200}, {"hidden_size": 96}, {"num_hidden_layers": 1}])
def test_saved_checkpoint_whose_config_was_edited(saved: Path, change: dict):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=r"is not the config of the saved shards: .* differ"):
        LLM(saved, **SETTINGS)


@pytest.mark.parametrize(
    ("file", "content"),
    [("amoeba.json", "{"), ("amoeba.json", '{"format": 1}'), ("amoeba.json", '{"format": 9}'), ("config.json", "[]")],
)
def test_damaged_saved_checkpoint(saved: Path, file: str, content: str):
    (saved / file).write_text(content)
    with pytest.raises(CheckpointError, match="saved"):
        LLM(saved, **SETTINGS)


def test_saving_over_something_is_refused(saved: Path):
    with LLM(saved, **SETTINGS) as llm, pytest.raises(CheckpointError, match="not empty"):
        llm.save(saved)
