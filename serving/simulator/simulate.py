"""Python API of the simulator.

Example:

    from serving.bench.workload import WorkloadConfig
    from serving.simulator.settings import SimulationConfig
    from serving.simulator.simulate import simulate

    config = SimulationConfig("config.json", WorkloadConfig(dataset_name="mix", duration_s=600), device="H20")
    result = simulate(config, "amoeba")
    result.report()["p99_ttft_ms"]
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving.bench.workload import plan_columns
from serving.simulator.errors import SimulationError
from serving.simulator.event_loop import Cluster, LoopConfig, Progress
from serving.simulator.requests import RequestTable
from serving.simulator.result import PolicyResult, collect
from serving.simulator.router import make_router
from serving.simulator.settings import SimulationConfig
from serving.simulator.setups import make_setups

_URGENT_STREAM = 7


def request_table(config: SimulationConfig) -> RequestTable:
    """Return the requests of a simulation.

    The requests are the same for all policies. Raises `ConfigError` for an invalid workload.
    """
    calibration = config.calibration
    context = config.max_model_len or (
        config.shape().max_position if calibration is None else calibration.max_model_len
    )
    plan = plan_columns(config.workload, context, shorten=False)
    outputs = np.maximum(plan.output_len, 1)
    allowed = outputs if config.max_tokens is None else np.maximum(outputs, config.max_tokens)
    inputs = np.maximum(plan.input_len, 1)
    priority, slo = plan.priorities, config.slo
    if unknown := set(slo.classes) - set(plan.kind_names):
        raise SimulationError(
            f"--slo has the class {min(unknown)[:100]!r}, but the classes of the requests are "
            f"{', '.join(plan.kind_names[:20])}"
        )
    if config.urgent_share:
        random = np.random.default_rng((config.seed, _URGENT_STREAM))
        priority = -(random.random(len(plan)) < config.urgent_share).astype(np.int64)
    kinds, names = _divided_by_priority(plan.kinds, plan.kind_names, priority)
    return RequestTable(
        plan.arrival_s,
        inputs,
        outputs,
        np.maximum(np.minimum(allowed, context - inputs), outputs),
        kinds,
        names,
        priority,
        None if config.deadline_s is None else np.full(len(plan), config.deadline_s),
        slo.own("ttft", plan.kinds, plan.kind_names, plan.ttft_slo_s),
        slo.own("tpot", plan.kinds, plan.kind_names, plan.tpot_slo_s),
        plan.prefix_blocks,
        plan.prefix_block_tokens,
        context,
    )


def _divided_by_priority(
    kinds: np.ndarray, names: tuple[str, ...], priority: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Divide the classes of requests so that all requests of a class have the same priority.

    Return `(kinds, names)`: the class of each request as an index, and the names of the classes.
    """
    if len(levels := np.unique(priority)) < 2:
        return kinds, names
    pairs, divided = np.unique(np.stack([kinds, priority]), axis=1, return_inverse=True)
    one = len(levels) == pairs.shape[1] and len(np.unique(pairs[0])) == 1
    texts = [f"priority {level}" if one else f"{names[kind]}, priority {level}" for kind, level in pairs.T.tolist()]
    return divided.reshape(-1), tuple(texts)


def simulate(
    config: SimulationConfig,
    policy: str,
    requests: RequestTable | None = None,
    progress: Progress | None = None,
    queue_limit: int | None = None,
) -> PolicyResult:
    """Simulate one policy. Raises `SimulationError` for an unknown policy, or if the model fits at no degree.

    Args:
        requests: result of `request_table`. Pass it to simulate several policies with one table. None: computed here.
        progress: function that receives the virtual time in seconds and the share of requests that have arrived.
        queue_limit: maximum number of waiting requests of a scheduler. If more requests wait, the run stops early.
            None: no limit.
    """
    setups = make_setups(config, policy)
    table = request_table(config) if requests is None else requests
    router = make_router(config.router, [setup.speed for setup in setups], config.seed, len(table))
    bin_s = max(table.span_s / 200, 0.5)
    pairs = [(setup.host, setup.make_policy) for setup in setups]
    cluster = Cluster(pairs, table, router, config.faults, bin_s)
    cluster.run(LoopConfig(config.until_s, config.drain_s, queue_limit), progress)
    return collect(policy, cluster, config.slo, config.num_devices, config.price_per_hour)


def report(config: SimulationConfig, results: Mapping[str, PolicyResult]) -> dict[str, Any]:
    """Return settings and results of all policies as a dict that JSON can represent.

    Equal configurations give equal reports.
    """
    settings = {}
    for name, value in vars(config).items():
        plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        settings[name] = _plain(plain)
    return {"settings": settings, "policies": {name: result.report() for name, result in results.items()}}


def save_report(content: dict[str, Any], path: Path) -> None:
    """Write a report to a JSON file. Raises `SimulationError` if that fails."""
    try:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise SimulationError(f"--json {path} cannot be written: {error}") from error


def _plain(value: Any) -> Any:
    """Convert a value to a form that JSON can represent.

    Infinity and NaN become text. A path becomes its last part.
    """
    if isinstance(value, Path):
        return value.name
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
