"""Setup of a simulated host for a policy name: the policy, the instances at the start, and the cost models.

`static-*` policies never merge or split instances (`layouts`). The names in `MECHANISMS` stand for other systems, which
are modelled in `comparators` and `disaggregation`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.scheduler import (
    POLICY_NAMES,
    AmoebaPolicy,
    CocoServePolicy,
    DegreeLimits,
    LayerSizes,
    Policy,
    StaticPolicy,
    is_policy_file,
    load_policy,
    make_policy,
)
from serving.scheduler.cocoserve.speedup import transition_cost
from serving.simulator.comparators import (
    HostMemoryCost,
    LayerExchangeCost,
    PipelineCost,
    SequenceParallelCost,
    ShiftCost,
    drop_limits,
    sequence_limits,
    shift_limits,
)
from serving.simulator.disaggregation import DisaggregatedPolicy
from serving.simulator.errors import DoesNotFitError, SimulationError
from serving.simulator.host_config import HandoverConfig, HostConfig
from serving.simulator.layouts import STATIC, degrees_at_start, is_static, num_prefill, read_parts
from serving.simulator.memory import MemoryPlan
from serving.simulator.pricing import Pricing
from serving.simulator.settings import SimulationConfig
from serving.simulator.spread import LayerCost
from serving.simulator.step_cost import ModelStepCost, StepCost, StepShape
from serving.simulator.transformation_cost import FixedTransformation, InPlaceCost, TransformationCost

REGROUP_S = 2e-3
"""Seconds without steps when requests pause or resume. No page moves. The engine rebuilds its views of the cache."""
STATIC_DEGREES = (1, 2, 4, 8)
"""Degrees of layouts that never change."""
_Capacities = Callable[[MemoryPlan, Sequence[int], int | None], tuple[DegreeLimits, ...]]
MECHANISMS = ("seesaw", "kunserve", "loongserve", "shift", "disaggregated")


@dataclass(frozen=True)
class Setup:
    """Configuration and policy of a simulated host, for one policy name."""

    name: str
    host: HostConfig
    make_policy: Callable[[], Policy]
    speed: float = 1.0
    """Speed of the host relative to other hosts: bytes per second of the memory of its devices."""


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies that can be simulated."""
    return (*POLICY_NAMES, *STATIC, *MECHANISMS)


def check_policies(names: Sequence[str]) -> None:
    """Raise `SimulationError` for an unknown policy, or an invalid layout in the name of a policy."""
    for name in names:
        if read_parts(name) is None and not is_policy_file(name) and name not in policy_names():
            raise SimulationError(
                f"policy {name[:100]!r} is unknown: it must be one of {', '.join(policy_names())}, a layout such as "
                "static:tp4x1+tp1x4, or a class in a file such as my_policy.py:Sjf"
            )


def make_setups(config: SimulationConfig, name: str) -> list[Setup]:
    """Return the setup (configuration and policy) of each host for a policy name.

    Raises the errors of `make_setup`. Raises `SimulationError` if devices fail in a simulation of `disaggregated`.
    """
    setups = []
    for part in config.parts():
        setup = make_setup(part, name)
        setups += [setup] * (part.num_devices // setup.host.num_devices)
    if config.faults.devices and any(setup.host.handover is not None for setup in setups):
        raise SimulationError("failures of devices cannot be simulated with disaggregated")
    return setups


def make_setup(config: SimulationConfig, name: str) -> Setup:
    """Return the setup (configuration and policy) of a host for a policy name. All devices must be of one kind.

    Raises `SimulationError` if the policy is unknown. Raises `DoesNotFitError` if the model fits at no degree that the
    policy needs, or if the devices cannot be divided into the instances that the policy needs.
    """
    check_policies((name,))
    if config.calibration is not None:
        return _calibrated(config, name)
    devices = config.host_devices()
    model, device = config.shape(), config.device_spec()
    memory = MemoryPlan(
        model,
        device,
        config.memory_utilization,
        None if config.activation_gb is None else config.activation_gb * 1e9,
        config.page_size,
        changes_degree=not is_static(name) and name != "seesaw",
    )
    degrees = tuple(d for d in (STATIC_DEGREES if is_static(name) else config.degrees) if d <= devices)
    if not degrees:
        raise DoesNotFitError(f"degrees={config.degrees} are all above the {devices} devices of a scheduler")
    base = ModelStepCost(model, device, config.profile())
    cost, transformation, capacities = _mechanism(name, base, config.page_size)
    limits = capacities(memory, degrees, config.max_num_seqs)
    start = degrees_at_start(name, devices, limits)[: config.instances_at_start]
    if is_static(name):
        limits = capacities(memory, sorted(set(start)), config.max_num_seqs)
    host = HostConfig(
        num_devices=devices,
        limits=limits,
        pricing=Pricing(cost, config.batching(), window=model.window),
        transformation=transformation,
        degrees_at_start=start,
        page_size=config.page_size,
        max_model_len=config.max_model_len or model.max_position,
        layers_per_step=config.layers_per_step,
        regroup_s=REGROUP_S,
        shows_timing=True,
        layers=layer_cost(memory, cost) if name == CocoServePolicy.name else None,
        handover=_handover(num_prefill(name, start), base),
    )
    speed = devices * device.memory_bandwidth
    return Setup(name, host, _maker(name, config, start), speed)


def _mechanism(name: str, base: ModelStepCost, page_size: int) -> tuple[StepCost, TransformationCost, _Capacities]:
    """Return the cost model of steps, the cost model of merges and splits, and the capacities for a policy."""
    model, device = base.model, base.device
    if name == "seesaw":
        return base, HostMemoryCost(model, device), MemoryPlan.limits
    if name == "kunserve":
        return PipelineCost(base), LayerExchangeCost(model, device), drop_limits
    if name == "loongserve":
        return SequenceParallelCost(base), FixedTransformation(1e-3, model.num_layers), sequence_limits
    if name == "shift":
        return ShiftCost(base), FixedTransformation(1e-3, model.num_layers), shift_limits
    return base, InPlaceCost(model, device, page_size=page_size), MemoryPlan.limits


def _handover(count: int, base: ModelStepCost) -> HandoverConfig | None:
    if not count:
        return None
    device = base.device
    sent = {degree: base.model.kv_token_bytes(degree) for degree in STATIC_DEGREES}
    return HandoverConfig(count, sent, device.link_bandwidth * device.link_efficiency, device.launch_s)


def layer_cost(memory: MemoryPlan, cost: StepCost) -> LayerCost:
    """Return the sizes and rates that determine the cost of placement changes, for a model on a device.

    Policies also see the cost of a transfer of hidden states between devices. This cost is for a step of 32 tokens.
    """
    model, device, rows = memory.model, memory.device, 32
    attention, ffn = model.attention_bytes, model.ffn_bytes / model.num_layers
    rate, row_bytes = device.link_bandwidth * device.link_efficiency, model.hidden_size * model.item_bytes
    layer_s = cost.fixed_s(1, StepShape(rows)) / model.num_layers
    sizes = LayerSizes(
        model.num_layers,
        attention,
        ffn,
        model.kv_token_bytes() / model.num_layers,
        model.weight_bytes - model.num_layers * (attention + ffn),
        transition_cost(rows * row_bytes, rate, device.launch_s, layer_s),
    )
    budget = device.memory_bytes * memory.utilization - memory.activations
    return LayerCost(sizes, budget, row_bytes, rate, device.host_bandwidth, device.launch_s)


def _maker(name: str, settings: SimulationConfig, start: Sequence[int]) -> Callable[[], Policy]:
    config = settings.policy_config
    if is_policy_file(name):
        return load_policy(name)
    if name in POLICY_NAMES:
        return lambda: make_policy(
            name, config=config, flying=settings.flying_config, cocoserve=settings.cocoserve_config
        )
    if count := num_prefill(name, start):
        return lambda: DisaggregatedPolicy(count, config.reserved_growth)
    if is_static(name) or name == "shift":
        return lambda: StaticPolicy(reserved_growth=config.reserved_growth)
    return lambda: AmoebaPolicy(config)


def _calibrated(config: SimulationConfig, name: str) -> Setup:
    calibration = config.calibration
    assert calibration is not None, "a calibration is required"
    if name.partition(":")[0] in MECHANISMS:
        raise SimulationError(
            f"policy {name!r} is no policy of the engine, so it cannot be simulated with a calibration"
        )
    devices = config.host_devices()
    limits = tuple(limit for limit in calibration.limits() if limit.degree <= devices)
    start = degrees_at_start(name, devices, limits)
    host = HostConfig(
        num_devices=devices,
        limits=limits,
        pricing=Pricing(
            calibration.step_cost(),
            config.batching(),
            calibration.crowding,
            calibration.latency_s,
            calibration.prompt_crowding,
        ),
        transformation=calibration.transformation(),
        degrees_at_start=start,
        page_size=calibration.page_size,
        max_model_len=config.max_model_len or calibration.max_model_len,
        layers_per_step=calibration.layers_per_step,
        regroup_s=REGROUP_S,
        launches_ahead=True,
        shows_timing=True,
    )
    return Setup(name, host, _maker(name, config, start))
