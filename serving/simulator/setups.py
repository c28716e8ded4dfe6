"""Setups by policy name: the scheduling policy, the degrees at the start, and the cost models of a host.

`static-*` policies never change degrees. `static-mixed` has one instance of a high degree, and instances of the lowest
degree on the other devices. `MECHANISMS` are other systems, modelled in `comparators`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from serving.scheduler import (
    POLICY_NAMES,
    AmoebaPolicy,
    CocoServePolicy,
    DegreeLimits,
    LayerSizes,
    Policy,
    StaticPolicy,
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
from serving.simulator.errors import SimulationError
from serving.simulator.host_config import HostConfig
from serving.simulator.memory import MemoryPlan
from serving.simulator.pricing import Pricing
from serving.simulator.settings import SimulationConfig
from serving.simulator.spread import LayerCost
from serving.simulator.step_cost import ModelStepCost, StepCost, StepShape
from serving.simulator.transformation_cost import FixedTransformation, InPlaceCost, TransformationCost

STATIC = ("static-tp1", "static-tp2", "static-tp4", "static-tp8", "static-mixed")
REGROUP_S = 2e-3
"""Seconds without steps when requests pause or resume. No page moves; the engine rebuilds its views of the cache."""
MECHANISMS = ("seesaw", "kunserve", "loongserve", "shift")


@dataclass(frozen=True)
class Setup:
    """Host configuration and policy for the simulation of one policy name."""

    name: str
    host: HostConfig
    make_policy: Callable[[], Policy]


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies that can be simulated."""
    return (*POLICY_NAMES, *STATIC, *MECHANISMS)


def check_policies(names: tuple[str, ...]) -> None:
    """Raise `SimulationError` for an unknown policy."""
    for name in names:
        if name not in policy_names():
            raise SimulationError(f"policy {name[:100]!r} is unknown: it must be one of {', '.join(policy_names())}")


def make_setup(config: SimulationConfig, name: str) -> Setup:
    """Return the setup of a policy.

    Raises `SimulationError` if the policy is unknown, the model fits at no degree that the policy needs, or the devices
    cannot be divided into instances of that degree.
    """
    check_policies((name,))
    if config.calibration is not None:
        return _calibrated(config, name)
    devices = config.host_devices()
    model, device = config.shape(), config.device_spec()
    changes = name not in STATIC
    memory = MemoryPlan(
        model,
        device,
        config.memory_utilization,
        None if config.activation_gb is None else config.activation_gb * 1e9,
        config.page_size,
        changes_degree=changes,
    )
    degrees = tuple(d for d in (config.degrees if changes else (1, 2, 4, 8)) if d <= devices)
    if not degrees:
        raise SimulationError(f"degrees={config.degrees} are all above the {devices} devices of a scheduler")
    cost: StepCost = ModelStepCost(model, device, config.profile())
    transformation: TransformationCost = InPlaceCost(model, device, page_size=config.page_size)
    if name == "seesaw":
        transformation = HostMemoryCost(model, device)
    elif name == "kunserve":
        cost = PipelineCost(ModelStepCost(model, device, config.profile()))
        transformation = LayerExchangeCost(model, device)
    elif name in ("loongserve", "shift"):
        base = ModelStepCost(model, device, config.profile())
        cost = SequenceParallelCost(base) if name == "loongserve" else ShiftCost(base)
        transformation = FixedTransformation(1e-3, model.num_layers)
    if name == "loongserve":
        limits = sequence_limits(memory, degrees, config.max_num_seqs)
    elif name == "shift":
        limits = shift_limits(memory, degrees, config.max_num_seqs)
    elif name == "kunserve":
        limits = drop_limits(memory, degrees, config.max_num_seqs)
    else:
        limits = memory.limits(degrees, config.max_num_seqs)
    start = _degrees_at_start(name, devices, limits)[: config.instances_at_start]
    host = HostConfig(
        num_devices=devices,
        limits=limits,
        pricing=Pricing(cost, config.batching()),
        transformation=transformation,
        degrees_at_start=start,
        page_size=config.page_size,
        max_model_len=config.max_model_len or model.max_position,
        layers_per_step=config.layers_per_step,
        regroup_s=REGROUP_S,
        shows_timing=True,
        layers=layer_cost(memory, cost) if name == CocoServePolicy.name else None,
    )
    return Setup(name, host, _maker(name, config))


def layer_cost(memory: MemoryPlan, cost: StepCost) -> LayerCost:
    """Return the costs of placement changes for a model on a device. A transition is measured with 32 rows."""
    model, device, rows = memory.model, memory.device, 32
    attention = sum(m.inputs * m.outputs for m in model.attention_matrices) * model.item_bytes
    ffn = model.ffn_bytes / model.num_layers
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


def _maker(name: str, settings: SimulationConfig) -> Callable[[], Policy]:
    config = settings.policy_config
    if name in POLICY_NAMES:
        return lambda: make_policy(
            name, config=config, flying=settings.flying_config, cocoserve=settings.cocoserve_config
        )
    if name in STATIC or name == "shift":
        return lambda: StaticPolicy(reserved_growth=config.reserved_growth)
    return lambda: AmoebaPolicy(config)


def _degrees_at_start(name: str, devices: int, limits: tuple[DegreeLimits, ...]) -> tuple[int, ...]:
    fitting = [limit.degree for limit in limits]
    if name == "static-mixed":
        largest = max((d for d in fitting if d <= devices - fitting[0]), default=None)
        largest = max((d for d in fitting if d <= max(devices // 2, 1)), default=largest)
        if largest is None:
            raise SimulationError(
                f"policy {name!r} needs two instances, but on {devices} devices the model fits only at "
                f"TP{', TP'.join(map(str, fitting))}"
            )
        return (largest,) + (fitting[0],) * _whole(devices - largest, fitting[0])
    if name.startswith("static-tp"):
        degree = int(name.removeprefix("static-tp"))
        if degree not in fitting:
            raise SimulationError(
                f"policy {name!r} needs TP{degree}, but on {devices} devices the model fits only at TP"
                f"{', TP'.join(map(str, fitting))}"
            )
        return (degree,) * _whole(devices, degree)
    degree = fitting[-1] if name == "shift" else fitting[0]
    return (degree,) * _whole(devices, degree)


def _whole(devices: int, degree: int) -> int:
    """Return `devices / degree`. Raises `SimulationError` if there is a remainder."""
    if devices % degree:
        raise SimulationError(f"{devices} devices are not a multiple of {degree}: an instance needs TP{degree}")
    return devices // degree


def _calibrated(config: SimulationConfig, name: str) -> Setup:
    calibration = config.calibration
    assert calibration is not None, "a calibration is required"
    if name in MECHANISMS:
        raise SimulationError(
            f"policy {name!r} is no policy of the engine, so it cannot be simulated with a calibration"
        )
    devices = config.host_devices()
    limits = tuple(limit for limit in calibration.limits() if limit.degree <= devices)
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
        degrees_at_start=_degrees_at_start(name, devices, limits),
        page_size=calibration.page_size,
        max_model_len=config.max_model_len or calibration.max_model_len,
        layers_per_step=calibration.layers_per_step,
        regroup_s=REGROUP_S,
        launches_ahead=True,
        shows_timing=True,
    )
    return Setup(name, host, _maker(name, config))
