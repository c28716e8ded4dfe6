"""`amoeba simulate`: read the settings, simulate the policies, and print and save the results."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from amoeba_jax.errors import ConfigError
from serving.bench.workload import WorkloadConfig
from serving.runtime.scheduling_config import SchedulingConfig
from serving.simulator.calibration import Calibration
from serving.simulator.explain import explain
from serving.simulator.faults import Faults
from serving.simulator.plot import load_matplotlib, save_plot
from serving.simulator.search import Answer, Trial, find_max_rate, find_min_devices
from serving.simulator.settings import SimulationConfig
from serving.simulator.setups import check_policies, make_setup
from serving.simulator.simulate import report, request_table, save_report, simulate
from serving.simulator.slo import Slo
from serving.simulator.table import answers_table, policies_table

_MEASURED = (
    "device", "devices_per_scheduler", "max_num_seqs", "max_num_batched_tokens", "memory_utilization", "activation_gb",
    "layers_per_step", "profile",
)  # fmt: skip
"""Options whose values come from a calibration, if one is given."""
_WIDTH = 150
"""Width of tables in characters if stdout is no terminal."""


@dataclass(frozen=True)
class OutputConfig:
    """Output of a simulation. Raises `ConfigError` if a file cannot be written.

    Attributes:
        json: file for the results.
        plot: file for a plot.
        explain: whether to print how each policy compares with the best policy.
        find_max_rate: whether to search for the highest rate at which a policy meets the limits (`--slo`).
        find_min_devices: whether to search for the fewest devices with which a policy meets the limits.
    """

    json: Path | None = None
    plot: Path | None = None
    explain: bool = False
    find_max_rate: bool = False
    find_min_devices: bool = False

    def __post_init__(self) -> None:
        for name in ("json", "plot"):
            path = getattr(self, name)
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise ConfigError(f"--{name} {path} cannot be written: it must be a file in an existing directory")
        if self.plot is not None:
            load_matplotlib()
        if self.find_max_rate and self.find_min_devices:
            raise ConfigError("--find-max-rate and --find-min-devices cannot be combined")


def simulation_config(flags: Mapping[str, Any], given: Collection[str] = ()) -> SimulationConfig:
    """Return the configuration of a simulation. Raises `ConfigError` for invalid options.

    Args:
        flags: values of all options of `amoeba simulate` by name.
        given: names of the options on the command line.
    """
    slo, more = flags["slo"] or [], flags["more_slo"] or []
    if more and not slo:
        raise ConfigError(f"unexpected arguments {' '.join(more)}: only --slo takes several values")
    workload = {item.name: flags[item.name] for item in fields(WorkloadConfig) if item.name in flags}
    if flags["trace"] is not None and flags["dataset_name"] == "mix":
        workload["dataset_name"] = "trace"
    objectives = Slo.from_text([*slo, *more], flags["slo_share"])
    limits = objectives.limits_s
    promised: dict[str, Any] = {f"{name}_slo_s": limits[name] for name in ("ttft", "tpot") if name in limits}
    decided = {item.name: flags[item.name] for item in fields(SchedulingConfig) if item.name in flags}
    scheduling = SchedulingConfig(**decided, **promised)
    policies = tuple(name.strip() for name in flags["policies"].split(",") if name.strip())
    check_policies(policies)
    calibration = None if flags["calibration"] is None else Calibration.load(flags["calibration"])
    if calibration is not None and (ignored := [name for name in _MEASURED if name in given]):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
        raise ConfigError(f"{names} cannot be combined with --calibration {flags['calibration']}, which sets them")
    if flags["model"] is None and calibration is None:
        raise ConfigError("--model is missing: pass a config.json, its directory, or --calibration")
    own = {item.name: flags[item.name] for item in fields(SimulationConfig) if item.name in flags}
    own |= {
        "model": flags["model"] or calibration.model if calibration is not None else flags["model"],
        "workload": WorkloadConfig(**workload),
        "policies": policies,
        "slo": objectives,
        "policy_config": scheduling.amoeba,
        "flying_config": scheduling.flying,
        "profiles": tuple(flags["profile"] or ()),
        "calibration": calibration,
        "faults": Faults.from_text(flags["fail"] or []),
    }
    if own["num_devices"] is None:
        own["num_devices"] = 8 if calibration is None else calibration.num_devices
    return SimulationConfig(**own)


def run_simulation(config: SimulationConfig, output: OutputConfig, console: Console | None = None) -> int:
    """Simulate all policies, print and save the results, and return the exit code.

    The exit code of a simulation is 0 if a request completed, else 1. The exit code of a search is 0 if it has found a
    value that meets the limits, else 1. Raises `ConfigError`.
    """
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH)
    for name in config.policies:
        make_setup(config, name)  # Raises for all policies before the first run.
    if output.find_max_rate or output.find_min_devices:
        return _search(config, output, console)
    requests = request_table(config)
    results = {}
    with _progress() as progress:
        for name in config.policies:
            task = progress.add_task(name, total=1.0)
            results[name] = simulate(config, name, requests, _follow(progress, task))
            progress.update(task, completed=1.0)
    console.print(policies_table(results, _title(config, len(requests))))
    if output.explain:
        for line in explain(results):
            console.print(line, soft_wrap=True, highlight=False)
    if output.json is not None:
        save_report(report(config, results), output.json)
    if output.plot is not None:
        save_plot(results, output.plot)
    return 0 if any(result.completed.any() for result in results.values()) else 1


def _title(config: SimulationConfig, count: int) -> str:
    if config.calibration is not None:
        what = f"{config.calibration.model}, calibrated"
    else:
        what = f"{config.shape().name}, {config.device_spec().name}"
    return f"{what}, {config.num_devices} devices, {count:,} requests"


def _search(config: SimulationConfig, output: OutputConfig, console: Console) -> int:
    find = find_max_rate if output.find_max_rate else find_min_devices
    what = "requests/s" if output.find_max_rate else "devices"
    answers: list[Answer] = []
    with _progress() as progress:
        task = progress.add_task("", total=None)
        for name in config.policies:

            def tell(trial: Trial, name: str = name) -> None:
                passed = "within" if trial.passed else "not within"
                progress.update(task, description=f"{name}: {trial.value:.4g} {what}, {passed}")

            answers.append(find(config, name, tell))
    limits = ", ".join(f"{name} {limit:g} s" for name, limit in config.slo.limits_s.items())
    best = "Most" if output.find_max_rate else "Fewest"
    console.print(f"{best} {what} at which {config.slo.share:.1%} of requests meet {limits}:", highlight=False)
    console.print(answers_table(answers, what))
    if output.json is not None:
        content = report(config, {})
        content["answers"] = [
            {"policy": a.policy, "value": a.value, "at_limit": a.at_limit, "trials": [vars(t) for t in a.trials]}
            for a in answers
        ]
        save_report(content, output.json)
    return 0 if any(answer.value is not None for answer in answers) else 1


def _progress() -> Progress:
    """Return a progress bar on stderr. The bar is hidden if stderr is no terminal."""
    columns: Sequence[Any] = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


def _follow(progress: Progress, task: TaskID) -> Callable[[float, float], None]:
    def follow(now_s: float, share: float) -> None:
        progress.update(task, completed=share)

    return follow
