"""Settings of the scheduler of a served model. Imports no JAX, as the command line needs them for its options."""

import math
from dataclasses import dataclass

from amoeba_jax.errors import ConfigError
from serving.scheduler import AmoebaConfig, Policy, UnknownPolicyError, make_policy


@dataclass(frozen=True)
class SchedulingConfig:
    """How requests are placed, and when instances change. Raises `ConfigError`. See docs/scheduling.md."""

    policy: str = "amoeba"
    """Policy that places requests and decides when instances merge and split: see docs/scheduling.md."""
    linger_s: float = AmoebaConfig.linger_s
    """Seconds that a merged instance is kept after its last long request."""
    split_free_share: float = AmoebaConfig.split_free_share
    """Share of a merged instance's KV cache that is free before it splits."""
    merge_again_after_s: float | None = AmoebaConfig.merge_again_after_s
    """Seconds after which a long request that waits may have another instance merged. Default: never."""
    merge_to: int = AmoebaConfig.merge_to
    """Lowest degree that instances merge to: 1, 2 or 4."""
    reserve_memory_s: float = AmoebaConfig.reserve_memory_s
    """Seconds for which room is kept for a long request as large as the largest that came."""
    reserved_growth: float = AmoebaConfig.reserved_growth
    """Share kept free of what running requests may still grow by, from 0 to 1."""
    layers_per_step: int = 1
    """Layers that a transformation changes between two steps. More end it sooner; running requests wait longer for a
    token while it lasts."""

    def __post_init__(self) -> None:
        for name in ("linger_s", "reserve_memory_s", "merge_again_after_s"):
            value = getattr(self, name)
            if name == "merge_again_after_s" and value is None:
                continue
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value!r} must be seconds, finite and at least 0")
        for name in ("split_free_share", "reserved_growth"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise ConfigError(f"{name}={value!r} must be from 0 to 1")
        layers = self.layers_per_step
        if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
            raise ConfigError(f"layers_per_step={layers!r} must be a positive integer")
        if isinstance(self.merge_to, bool) or self.merge_to not in (1, 2, 4):
            raise ConfigError(f"merge_to={self.merge_to!r} must be a degree: 1, 2 or 4")
        try:
            self.make_policy()
        except UnknownPolicyError as error:
            raise ConfigError(str(error)) from None

    def make_policy(self, name: str | None = None) -> Policy:
        """A new policy: the one of these settings, or another by name. Raises `UnknownPolicyError`."""
        config = AmoebaConfig(
            split_free_share=self.split_free_share,
            linger_s=self.linger_s,
            merge_again_after_s=self.merge_again_after_s,
            merge_to=self.merge_to,
            reserve_memory_s=self.reserve_memory_s,
            reserved_growth=self.reserved_growth,
        )
        return make_policy(self.policy if name is None else name, config=config)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
