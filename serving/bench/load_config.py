"""Settings of the requests that `amoeba bench` sends.

Imports no gRPC, so that the command line starts fast.
"""

from dataclasses import dataclass

from amoeba_jax.errors import ConfigError
from amoeba_jax.sampling_params import SamplingParams

MAX_PREFIX_CHARS = 80
"""Maximum length of the prefix of request ids, in characters. An id may have 128 characters."""


@dataclass(frozen=True)
class LoadConfig:
    """Settings of the requests that a benchmark sends.

    Raises `RequestError` for an invalid temperature, and `ConfigError` for any other invalid value.
    """

    seed: int = 0
    """Seed of the random generator for prompts."""
    temperature: float = 0.0
    """Sampling temperature: 0 takes the greedy token, above 0 samples."""
    ignore_eos: bool = True
    """Whether requests generate all planned tokens, past the end-of-sequence tokens of the model."""
    max_concurrency: int | None = None
    """Maximum number of requests in flight; further requests wait in this program. Default: no limit."""
    request_id_prefix: str = "bench-"
    """Prefix of request ids. It is also the cache salt, so that no prompt finds cached pages of an earlier run."""

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency={self.max_concurrency} must be at least 1")
        if len(self.request_id_prefix) > MAX_PREFIX_CHARS:
            raise ConfigError(
                f"request_id_prefix has {len(self.request_id_prefix)} characters: the maximum is {MAX_PREFIX_CHARS}"
            )
        SamplingParams(temperature=self.temperature)  # Raises for an invalid temperature.
