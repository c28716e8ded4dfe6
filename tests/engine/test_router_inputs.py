"""All ranks choose the same experts: the inputs of their routers are equal bit by bit."""

import threading
from collections import Counter, defaultdict
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import lax
from tiny_models import ragged_prompts, tiny_model

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.models.experts import MixtureOfExperts
from sharding.mesh import TP_AXIS

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), [("qwen3-moe", 4), ("gpt-oss", 2)])
def test_router_inputs_are_equal_on_all_ranks(name: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inputs: dict[int, Counter[bytes]] = defaultdict(Counter)
    lock, route = threading.Lock(), MixtureOfExperts.route

    def record(rank: np.ndarray, x: np.ndarray) -> None:
        with lock:
            inputs[int(rank)][np.asarray(x).tobytes()] += 1

    def recorded(experts: MixtureOfExperts, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        jax.debug.callback(record, lax.axis_index(TP_AXIS), x)
        return route(experts, x)

    monkeypatch.setattr(MixtureOfExperts, "route", recorded)
    with LLM(
        tiny_model(name, tmp_path),
        num_devices=tp,
        tensor_parallel_size=tp,
        device_memory="8MiB",
        max_num_batched_tokens=16,
        max_model_len=64,
        segment_layers=1,
        compile_cache="",  # the key of the cache does not cover the patched function
        progress=False,
    ) as llm:
        prompts = ragged_prompts(llm.dims.config.vocab_size)[3:]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    jax.effects_barrier()
    assert set(inputs) == set(range(tp))
    assert sum(inputs[0].values()) >= 2 * (len(prompts) + 8)
    assert all(seen == inputs[0] for seen in inputs.values())
