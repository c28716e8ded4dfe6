"""Creation of policies by name."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serving.scheduler.admission import Admission
from serving.scheduler.amoeba import AmoebaPolicy
from serving.scheduler.amoeba_config import AmoebaConfig
from serving.scheduler.baselines.amoeba_paper import AmoebaPaperPolicy, PaperConfig
from serving.scheduler.baselines.least_load_first import LeastLoadFirstPolicy
from serving.scheduler.baselines.round_robin import RoundRobinPolicy
from serving.scheduler.cocoserve.config import CocoServeConfig
from serving.scheduler.cocoserve.policy import CocoServePolicy
from serving.scheduler.flying import FlyingPolicy
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.policy import Policy
from serving.scheduler.static import StaticPolicy


class UnknownPolicyError(ValueError):
    """Error for a policy name that is not known, or whose class cannot be loaded."""


@dataclass(frozen=True)
class _Settings:
    admission: Admission
    amoeba: AmoebaConfig
    flying: FlyingConfig
    cocoserve: CocoServeConfig


_MAKERS: dict[str, Callable[[_Settings], Policy]] = {
    AmoebaPolicy.name: lambda s: AmoebaPolicy(s.amoeba, s.admission),
    AmoebaPaperPolicy.name: lambda s: AmoebaPaperPolicy(
        PaperConfig(reserve_memory_s=s.amoeba.reserve_memory_s, reserved_growth=s.amoeba.reserved_growth), s.admission
    ),
    FlyingPolicy.name: lambda s: FlyingPolicy(s.flying, s.admission),
    CocoServePolicy.name: lambda s: CocoServePolicy(s.cocoserve, s.amoeba, s.admission, s.flying),
    RoundRobinPolicy.name: lambda s: RoundRobinPolicy(s.admission, s.amoeba.reserved_growth, s.amoeba.splits),
    LeastLoadFirstPolicy.name: lambda s: LeastLoadFirstPolicy(s.admission, s.amoeba.reserved_growth, s.amoeba.splits),
    StaticPolicy.name: lambda s: StaticPolicy(s.admission, s.amoeba.reserved_growth),
}
POLICY_NAMES = tuple(_MAKERS)


def make_policy(
    name: str,
    admission: Admission | None = None,
    config: AmoebaConfig | None = None,
    flying: FlyingConfig | None = None,
    cocoserve: CocoServeConfig | None = None,
) -> Policy:
    """Create a policy by its name. Raises `UnknownPolicyError` for an unknown name.

    Args:
        name: one of `POLICY_NAMES`.
        admission: order and limits of the queue.
        config: settings of `amoeba` and `cocoserve`. `round_robin` and `least_load_first` use only the split settings
            and `reserved_growth`. `amoeba_paper` uses `reserve_memory_s` and `reserved_growth`. `static` uses
            `reserved_growth`.
        flying: settings of `flying`, and of `cocoserve` if its `request_policy` is "flying".
        cocoserve: further settings of `cocoserve`.
    """
    if name not in _MAKERS:
        raise UnknownPolicyError(f"policy {name[:100]!r} is not known: it must be one of {', '.join(POLICY_NAMES)}")
    settings = _Settings(
        admission or Admission(), config or AmoebaConfig(), flying or FlyingConfig(), cocoserve or CocoServeConfig()
    )
    return _MAKERS[name](settings)


def is_policy_file(name: str) -> bool:
    """Return whether the name of a policy refers to a class in a file, such as `my_policy.py:Sjf`."""
    return name.rpartition(":")[0].endswith(".py")


def load_policy(name: str) -> Callable[[], Policy]:
    """Run a Python file, and return a policy class that the file defines.

    `name` is the path and the class, such as `my_policy.py:Sjf`. Raises `UnknownPolicyError` if the file or the class
    does not exist, or if the class has no `name`, has no `decide`, or needs arguments.
    """
    file, _, wanted = name.rpartition(":")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"policy_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UnknownPolicyError(f"policy {name[:200]!r}: there is no file {file[:200]}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found = getattr(module, wanted)
        policy = found()
    except Exception as error:
        raise UnknownPolicyError(f"policy {name[:200]!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(getattr(policy, "name", None), str) or not callable(getattr(policy, "decide", None)):
        raise UnknownPolicyError(f"policy {name[:200]!r} must have a name, and a method decide(view)")
    return found
