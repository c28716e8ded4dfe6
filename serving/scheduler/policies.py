"""Policies by name."""

from collections.abc import Callable

from serving.scheduler.admission import Admission
from serving.scheduler.amoeba import AmoebaPolicy
from serving.scheduler.amoeba_config import AmoebaConfig
from serving.scheduler.baselines.amoeba_paper import AmoebaPaperPolicy, PaperConfig
from serving.scheduler.baselines.least_load_first import LeastLoadFirstPolicy
from serving.scheduler.baselines.round_robin import RoundRobinPolicy
from serving.scheduler.flying import FlyingPolicy
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.policy import Policy
from serving.scheduler.static import StaticPolicy


class UnknownPolicyError(ValueError):
    """A policy name that does not exist."""


_MAKERS: dict[str, Callable[[Admission, AmoebaConfig, FlyingConfig], Policy]] = {
    AmoebaPolicy.name: lambda admission, config, _: AmoebaPolicy(config, admission),
    AmoebaPaperPolicy.name: lambda admission, config, _: AmoebaPaperPolicy(
        PaperConfig(reserve_memory_s=config.reserve_memory_s, reserved_growth=config.reserved_growth), admission
    ),
    FlyingPolicy.name: lambda admission, _, config: FlyingPolicy(config, admission),
    RoundRobinPolicy.name: lambda admission, config, _: RoundRobinPolicy(
        admission, config.reserved_growth, config.splits
    ),
    LeastLoadFirstPolicy.name: lambda admission, config, _: LeastLoadFirstPolicy(
        admission, config.reserved_growth, config.splits
    ),
    StaticPolicy.name: lambda admission, config, _: StaticPolicy(admission, config.reserved_growth),
}
POLICY_NAMES = tuple(_MAKERS)


def make_policy(
    name: str,
    admission: Admission | None = None,
    config: AmoebaConfig | None = None,
    flying: FlyingConfig | None = None,
) -> Policy:
    """Create a policy by its name. Raises `UnknownPolicyError` for an unknown name.

    Args:
        name: one of `POLICY_NAMES`.
        admission: order and limits of the queue.
        config: settings of `amoeba`. `round_robin` and `least_load_first` use its split settings and `reserved_growth`,
            `amoeba_paper` uses `reserve_memory_s` and `reserved_growth`, and `static` uses `reserved_growth`.
        flying: settings of `flying`.
    """
    if name not in _MAKERS:
        raise UnknownPolicyError(f"policy {name[:100]!r} is not known: it must be one of {', '.join(POLICY_NAMES)}")
    return _MAKERS[name](admission or Admission(), config or AmoebaConfig(), flying or FlyingConfig())
