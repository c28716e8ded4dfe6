"""Helpers for tests under load: empty prefix caches, undisturbed outputs, and checks that nothing is left."""

from harness import engine_of, in_dispatcher, registry_of

from amoeba_jax import LLM, SamplingParams
from amoeba_jax.outputs import CompletionOutput
from amoeba_jax.prompts import Prompt

TIMEOUT_S = 300
"""Timeout of calls that could hang. A test that reaches it has failed."""


def forget_prefixes(llm: LLM) -> None:
    """Empty the prefix caches of all instances."""

    def clear() -> None:
        for instance in engine_of(llm).instances:
            for lane in instance.lanes:
                lane.cache.clear()

    in_dispatcher(llm, clear)


def alone(llm: LLM, prompt: Prompt, params: SamplingParams) -> tuple[CompletionOutput, ...]:
    """Return the outputs of a request that runs alone, without cached prefixes."""
    forget_prefixes(llm)
    return llm.generate(prompt, params)[0].outputs


def check_idle(llm: LLM) -> None:
    """Check that no request is left, and that every page of every allocator is free without the prefix caches."""
    views = llm.instances
    assert [(view.running, view.waiting, view.kv_used_pages) for view in views] == [(0, 0, 0)] * len(views)
    assert not registry_of(llm).ids
    forget_prefixes(llm)
    used = [allocator for i in engine_of(llm).instances for of in i.allocators.values() for allocator in of]
    for allocator in [*engine_of(llm).cluster.factory.allocators, *used]:
        assert allocator.free_units == allocator.total_units
