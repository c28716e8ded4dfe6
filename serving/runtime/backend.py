"""The interface of a model for the request handler. `LLM` implements it."""

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
    """A model that generates and whose instances change. Methods may be called from several threads."""

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
        """Yield the new output of a request after each step. Closing the generator aborts the request.

        Args:
            prompt: text or token ids.
            params: sampling settings.
            request_id: id for `cancel`.
            cache_salt: salt of cached prefixes.
            deadline: time of `time.monotonic()` by which the request must start.
            client: owner of the request. Clients get equal shares of slots and KV cache.
            arrival: time of `time.monotonic()` from which times count. None: now.

        Raises:
            DeadlineError: the request has not started by `deadline`.
        """
        ...

    def cancel(self, request_id: str) -> bool:
        """Abort a request. Return whether it was running or waiting."""
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
        """Merge or split instances, and return when this is done."""
        ...

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus output that any layout holds."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Running totals. Raises `EngineClosedError` if the engine has failed."""
        ...

    @property
    def instances(self) -> tuple[InstanceStatus, ...]:
        """Present instances."""
        ...

    def memory(self) -> MemoryReport:
        """Return the bytes of each owner on each device."""
        ...
