"""`amoeba simulate`: read the settings, simulate the policies, and print and save the results."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from amoeba_jax.errors import ConfigError
from serving.bench.workload import WorkloadConfig
from serving.runtime.scheduling_config import SchedulingConfig
from serving.simulator.calibration import Calibration
from serving.simulator.errors import DoesNotFitError
from serving.simulator.explain import explain, limits_line
from serving.simulator.faults import Faults
from serving.simulator.plot import draw, draw_sweep, load_matplotlib, save_plot
from serving.simulator.requests import RequestTable
from serving.simulator.search import Answer, Trial, find_max_rate, find_min_devices, scale_workload
from serving.simulator.sensitivity import sensitivity, sensitivity_lines
from serving.simulator.settings import SimulationConfig
from serving.simulator.setups import check_policies, make_setups
from serving.simulator.simulate import report, request_table, save_report, simulate
from serving.simulator.slo import Slo
from serving.simulator.table import SweepPoint, answers_table, policies_table, sweep_table

_MEASURED = (
    "device", "devices_per_scheduler", "max_num_seqs", "max_num_batched_tokens", "memory_utilization", "activation_gb",
    "layers_per_step", "profile",
)  # fmt: skip
"""Options whose values come from a calibration, if one is given."""
MAX_FACTORS, MAX_FACTOR = 50, 1000.0
"""Limits of the factors of `--sweep-rate`."""
_WIDTH = 150
"""Width of tables in characters if stdout is no terminal."""


@dataclass(frozen=True)
class OutputConfig:
    """Settings of the output of a simulation. Raises `ConfigError` if a file cannot be written.

    Attributes:
        json: file for the results.
        plot: file for a plot.
        explain: whether to print how each policy compares with the best policy.
        find_max_rate: whether to search for the highest request rate at which a policy meets the limits (`--slo`).
        find_min_devices: whether to search for the fewest devices with which a policy meets the limits.
        sweep_rate: factors of the request rate, for a table of all policies at each rate. Empty: no such table.
        sensitivity: whether to repeat the comparison with 20% higher and 20% lower constants of the device.
    """

    json: Path | None = None
    plot: Path | None = None
    explain: bool = False
    find_max_rate: bool = False
    find_min_devices: bool = False
    sweep_rate: tuple[float, ...] = ()
    sensitivity: bool = False

    def __post_init__(self) -> None:
        for name in ("json", "plot"):
            path = getattr(self, name)
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise ConfigError(f"--{name} {path} cannot be written: it must be a file in an existing directory")
        if self.plot is not None:
            load_matplotlib()
        kinds = {
            "--find-max-rate": self.find_max_rate,
            "--find-min-devices": self.find_min_devices,
            "--sweep-rate": bool(self.sweep_rate),
            "--sensitivity": self.sensitivity,
        }
        if len(chosen := [name for name, is_set in kinds.items() if is_set]) > 1:
            raise ConfigError(f"{' and '.join(chosen)} cannot be combined")
        searches = self.find_max_rate or self.find_min_devices
        for name, is_set in (("--explain", self.explain and not self.sensitivity), ("--plot", searches and self.plot)):
            if is_set and chosen:
                raise ConfigError(f"{name} cannot be combined with {chosen[0]}, which compares no runs of one load")


def read_factors(text: str | None) -> tuple[float, ...]:
    """Return the numbers in a text such as `0.5,1,2`. None gives an empty tuple.

    Raises `ConfigError` for an invalid number.
    """
    if text is None:
        return ()
    parts = text.split(",")
    try:
        factors = tuple(float(part) for part in parts)
    except ValueError:
        factors = (0.0,)
    if len(factors) > MAX_FACTORS or not all(0 < factor <= MAX_FACTOR for factor in factors):
        raise ConfigError(
            f"--sweep-rate {text[:100]!r} must be at most {MAX_FACTORS} factors of the rate with commas between, above "
            f"0 and at most {MAX_FACTOR:g}, such as 0.5,1,2"
        )
    return factors


def simulation_config(flags: Mapping[str, Any], given: Collection[str] = ()) -> SimulationConfig:
    """Return the configuration of a simulation. Raises `ConfigError` for invalid options.

    Args:
        flags: values of all options of `amoeba simulate` by name, including default values.
        given: names of the options that the user gave on the command line.
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

    The exit code is 1 in two cases: no request of a comparison completed, or a search (`find_max_rate` or
    `find_min_devices`) found nothing. In all other cases, it is 0. If a policy does not fit the model or the devices,
    its results are replaced by the reason. Raises `ConfigError` for invalid settings.
    """
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH)
    reasons: dict[str, str] = {}
    for name in config.policies:
        try:
            make_setups(config, name)  # Raises for all policies before the first run.
        except DoesNotFitError as error:
            reasons[name] = str(error)
    if len(reasons) == len(config.policies):
        raise DoesNotFitError("; ".join(dict.fromkeys(reasons.values())))
    config = replace(config, policies=tuple(name for name in config.policies if name not in reasons))
    requests = request_table(config)
    for line in notices(requests):
        console.print(line, soft_wrap=True, highlight=False)
    if output.find_max_rate or output.find_min_devices:
        code, content = _search(config, output, console, reasons)
    elif output.sweep_rate:
        code, content = _sweep(config, output, console)
    else:
        code, content = _compare(config, output, console, requests, reasons)
    for name, reason in reasons.items():
        console.print(f"{name}: not possible: {reason}", soft_wrap=True, highlight=False)
    if output.json is not None:
        save_report(content | {"not_possible": reasons}, output.json)
    return code


def notices(requests: RequestTable) -> list[str]:
    """Return warnings about requests that no policy can serve."""
    if not (count := int(requests.too_long.sum())):
        return []
    lengths = (requests.input_len + requests.output_len)[requests.too_long]
    return [
        f"WARNING: {count:,} of {len(requests):,} requests have more tokens than the context of the model "
        f"({requests.max_model_len:,}; the longest has {lengths.max():,}). They are refused, as `amoeba serve` refuses "
        "them, and count as failed."
    ]


def _compare(
    config: SimulationConfig,
    output: OutputConfig,
    console: Console,
    requests: RequestTable,
    reasons: Mapping[str, str],
) -> tuple[int, dict[str, Any]]:
    results = {}
    with _Progress() as progress:
        for name in config.policies:
            results[name] = simulate(config, name, requests, progress.follow(name))
        console.print(policies_table(results, _title(config, len(requests)), reasons))
        lines = [limits_line(result) for result in results.values()]
        lines += explain(results) if output.explain else []
        content = report(config, results)
        if output.sensitivity:
            conclusions, changes = sensitivity(config, results, requests, progress.show)
            lines += sensitivity_lines(conclusions, changes)
            content["sensitivity"] = [vars(conclusion) for conclusion in conclusions]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    if output.plot is not None:
        save_plot(draw(results), output.plot)
    return (0 if any(result.completed.any() for result in results.values()) else 1), content


def _sweep(config: SimulationConfig, output: OutputConfig, console: Console) -> tuple[int, dict[str, Any]]:
    points = []
    with _Progress() as progress:
        for factor in output.sweep_rate:
            scaled = replace(config, workload=scale_workload(config.workload, factor))
            requests = request_table(scaled)
            rate = len(requests) / (requests.span_s or 1.0)
            results = {}
            for name in config.policies:
                progress.show(f"{name}: {rate:.3g} requests/s")
                results[name] = simulate(scaled, name, requests)
            points.append(SweepPoint(rate, results))
    title = f"{_title(config, None)}: goodput in requests/s, and share of requests within the objectives"
    console.print(sweep_table(points, title))
    if output.plot is not None:
        save_plot(draw_sweep(points), output.plot)
    content = report(config, {})
    content["sweep"] = [
        {"rate": point.rate, "policies": {name: result.report() for name, result in point.results.items()}}
        for point in points
    ]
    return 0, content


def _title(config: SimulationConfig, count: int | None) -> str:
    if config.calibration is not None:
        what = f"{config.calibration.model}, calibrated"
    else:
        device = config.device if isinstance(config.device, str) else config.device.name
        what = f"{config.shape().name}, {device}"
    return f"{what}, {config.num_devices} devices" + ("" if count is None else f", {count:,} requests")


def _search(
    config: SimulationConfig, output: OutputConfig, console: Console, reasons: Mapping[str, str]
) -> tuple[int, dict[str, Any]]:
    find = find_max_rate if output.find_max_rate else find_min_devices
    what = "requests/s" if output.find_max_rate else "devices"
    answers: list[Answer] = []
    with _Progress() as progress:
        for name in config.policies:

            def tell(trial: Trial, name: str = name) -> None:
                passed = "within the objectives" if trial.passed else trial.lacks
                progress.show(f"{name}: {trial.value:.4g} {what}: {passed}")

            progress.show(f"{name}: search started")
            answers.append(find(config, name, tell))
    limits = ", ".join(f"{name} {limit:g} s" for name, limit in config.slo.limits_s.items())
    best = "Most" if output.find_max_rate else "Fewest"
    console.print(f"{best} {what} at which {config.slo.share:.1%} of requests meet {limits}:", highlight=False)
    console.print(answers_table(answers, what, reasons, config.price_per_hour))
    content = report(config, {})
    content["answers"] = [
        {"policy": a.policy, "value": a.value, "at_limit": a.at_limit, "note": a.note}
        | {"trials": [vars(trial) for trial in a.trials]}
        for a in answers
    ]
    return (0 if any(answer.value is not None for answer in answers) else 1), content


class _Progress:
    """Progress on stderr. A terminal shows a bar. Other outputs get a line for each simulation of a series."""

    def __init__(self) -> None:
        columns: Sequence[Any] = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._is_terminal = sys.stderr.isatty()
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not self._is_terminal)
        self._task: TaskID | None = None

    def __enter__(self) -> "_Progress":
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def follow(self, name: str) -> Callable[[float, float], None]:
        """Return a function that shows the progress of the policy `name`. The caller passes it to `simulate`."""
        task = self._bar.add_task(name, total=1.0)
        return lambda now_s, share: self._bar.update(task, completed=share)

    def show(self, text: str) -> None:
        """Show a text about the current simulation of a series."""
        if not self._is_terminal:
            print(text, file=sys.stderr, flush=True)
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=None)
        self._bar.update(self._task, description=text)
