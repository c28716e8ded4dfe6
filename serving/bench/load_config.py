"""How `amoeba bench` sends requests: imports no gRPC, as the command line needs it for its options."""

from dataclasses import dataclass

from amoeba_jax.errors import ConfigError
from amoeba_jax.sampling_params import SamplingParams

MAX_PREFIX_CHARS = 80
"""Ids may have 128."""


@dataclass(frozen=True)
class LoadConfig:
    """How requests are sent. Raises `ConfigError`, and `RequestError` for a temperature that cannot be."""

    seed: int = 0
    """Seed of the random generator for prompts."""
    temperature: float = 0.0
    """Sampling temperature: 0 takes the greedy token, above 0 samples."""
    ignore_eos: bool = True
    """Generate as many tokens as planned, past the model's end-of-sequence tokens."""
    max_concurrency: int | None = None
    """Largest number of requests in flight: others wait in this program. Default: no limit."""
    request_id_prefix: str = "bench-"
    """Prefix of the requests' ids. It is their cache salt as well: no prompt finds cached pages of an earlier run."""

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency={self.max_concurrency} must be at least 1")
        if len(self.request_id_prefix) > MAX_PREFIX_CHARS:
            raise ConfigError(
                f"request_id_prefix has {len(self.request_id_prefix)} characters: the most is {MAX_PREFIX_CHARS}"
            )
        SamplingParams(temperature=self.temperature)  # checks it
