"""What the request handler needs of what serves its requests: `LLM` has it."""

from collections.abc import AsyncGenerator
from typing import Any, Literal, Protocol

from amoeba_jax.models.dims import ModelDims
from amoeba_jax.outputs import RequestDelta
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.stats import EngineStats
from amoeba_jax.tokenizer import Tokenizer
from amoeba_jax.transform.options import RunningRequests
from amoeba_jax.transform.report import TransformReport, TransformVariant
from amoeba_jax.views import InstanceStatus, MemoryReport


class Backend(Protocol):
    """Generates for prompts, and changes instances. Methods may be called from several threads."""

    name: str
    tokenizer: Tokenizer | None
    dims: ModelDims
    eos_token_ids: frozenset[int]

    def astream_deltas(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        deadline: float | None = None,
        client: str = "",
        arrival: float | None = None,
    ) -> AsyncGenerator[tuple[Any, RequestDelta], None]:
        """What is new of a request, as it comes. Closing the generator ends the request and frees its pages.

        While several clients have requests, each has an equal share of slots and of the KV cache. Times are counted
        from `arrival`, a time of `time.monotonic()`; None: from now.

        Raises `DeadlineError` if it has not started by `deadline`, a time of `time.monotonic()`.
        """
        ...

    def cancel(self, request_id: str) -> bool:
        """End a request with reason `abort`; whether there was one."""
        ...

    def transform(
        self,
        tensor_parallel_size: int,
        devices: list[int] | None = None,
        variant: str = TransformVariant.IN_PLACE_OVERLAPPED,
        release_weights: bool = True,
        layers_per_step: int | Literal["auto"] = "auto",
        wait_for_programs: bool = True,
        running: RunningRequests = "migrate",
    ) -> TransformReport:
        """Merge or split instances; returns when it is done."""
        ...

    @property
    def num_devices(self) -> int:
        """Devices that it serves on."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens that any layout holds."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Running totals. Raises `EngineClosedError` once the engine has failed."""
        ...

    @property
    def instances(self) -> tuple[InstanceStatus, ...]:
        """The instances as they are now."""
        ...

    def memory(self) -> MemoryReport:
        """Who owns which bytes."""
        ...
