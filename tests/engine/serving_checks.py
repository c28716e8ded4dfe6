"""What tests of serving under load have in common: small caches, requests alone, and what is left afterwards."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.config import EngineConfig
from amoeba_jax.engine.memory import plan_memory
from amoeba_jax.errors import MemoryBudgetError
from amoeba_jax.llm import Prompt
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.outputs import CompletionOutput

TIMEOUT_S = 300
"""For whatever could wait for ever; a test that gets there has failed."""


def memory_for_pages(directory: Path, settings: dict[str, Any], num_pages: int) -> int:
    """The `device_memory` that leaves the KV cache of each device exactly so many pages."""
    ample: dict[str, Any] = {**settings, "device_memory": "64MiB"}
    with LLM(directory, **ample) as llm:
        dims, config, plan = llm.dims, llm.config, llm._engine.cluster.memory_plan
    size = plan.weight_bytes + plan.activation_bytes + plan.sampling_bytes
    size += num_pages * plan.page_bytes * dims.config.num_layers
    # The staging buffer's size follows from what is left.
    while _num_pages(dims, replace(config, device_memory=size), plan.weight_bytes) < num_pages:
        size += plan.page_bytes
    return size


def _num_pages(dims: ModelDims, config: EngineConfig, weight_bytes: int) -> int:
    try:
        return plan_memory(dims, config, weight_bytes, jax.devices()[0]).num_pages
    except MemoryBudgetError:
        return 0


def forget_prefixes(llm: LLM) -> None:
    """Empty the prefix caches of all instances."""

    def clear() -> None:
        for instance in llm._engine.instances:
            instance.cache.clear()

    llm._dispatcher.call(clear).result(TIMEOUT_S)


def alone(llm: LLM, prompt: Prompt, params: SamplingParams) -> tuple[CompletionOutput, ...]:
    """A request's outputs with nothing beside it and no prefix of it in the cache."""
    forget_prefixes(llm)
    return llm.generate(prompt, params)[0].outputs


def check_idle(llm: LLM) -> None:
    """Nothing runs, waits or is remembered, and every page of every allocator is free once prefixes are forgotten."""
    views = llm.instances
    assert [(view.running, view.waiting, view.kv_used_pages) for view in views] == [(0, 0, 0)] * len(views)
    assert not llm._requests
    forget_prefixes(llm)
    for allocator in llm._engine.cluster.allocators:
        assert allocator.free_units == allocator.total_units
