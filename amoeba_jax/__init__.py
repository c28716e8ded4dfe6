"""amoeba-jax: LLM serving whose tensor-parallel degree is a run-time property."""

from typing import TYPE_CHECKING, Any

from amoeba_jax.config import EngineConfig
from amoeba_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.structured_output import StructuredOutput

if TYPE_CHECKING:
    from amoeba_jax.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
]


def __getattr__(name: str) -> Any:
    # `LLM` imports JAX. It is imported only on first use, so that the import of settings alone is fast.
    if name == "LLM":
        from amoeba_jax.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
