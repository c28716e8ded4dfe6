"""What tests of serving under load have in common: small caches, requests alone, and what is left afterwards."""

from harness import engine_of, in_dispatcher, registry_of

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.outputs import CompletionOutput
from amoeba_jax.prompts import Prompt

TIMEOUT_S = 300
"""For whatever could wait for ever; a test that gets there has failed."""


def forget_prefixes(llm: LLM) -> None:
    """Empty the prefix caches of all instances."""

    def clear() -> None:
        for instance in engine_of(llm).instances:
            for lane in instance.lanes:
                lane.cache.clear()

    in_dispatcher(llm, clear)


def alone(llm: LLM, prompt: Prompt, params: SamplingParams) -> tuple[CompletionOutput, ...]:
    """A request's outputs with nothing beside it and no prefix of it in the cache."""
    forget_prefixes(llm)
    return llm.generate(prompt, params)[0].outputs


def check_idle(llm: LLM) -> None:
    """Nothing runs, waits or is remembered, and every page of every allocator is free once prefixes are forgotten."""
    views = llm.instances
    assert [(view.running, view.waiting, view.kv_used_pages) for view in views] == [(0, 0, 0)] * len(views)
    assert not registry_of(llm).ids
    forget_prefixes(llm)
    for allocator in engine_of(llm).cluster.factory.allocators:
        assert allocator.free_units == allocator.total_units
