"""Tables that show the report of a benchmark run in a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from serving.bench.metrics import METRICS, MetricsConfig


def print_report(report: dict[str, Any], config: MetricsConfig, console: Console) -> None:
    """Print the report of a run: totals, latencies, failures, and merges and splits of instances."""
    console.print(_totals(report))
    if config.percentile_metrics:
        console.print(_latencies(report, config))
    for failure in report["failures"]:
        line = f"Failed with {failure['status']}: {failure['count']} requests, the first with: {failure['text']}"
        console.print(Text(line, style="red"), soft_wrap=True)
    for line in _notes(report):
        console.print(Text(line), soft_wrap=True)


def _groups(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each class, phase and priority of requests. The keys are headings of columns."""
    phases = {f"{name} phases": figures for name, figures in report["phases"].items()}
    return report["classes"] | phases | {f"priority {name}": it for name, it in report["priorities"].items()}


def _totals(report: dict[str, Any]) -> Table:
    """Return a table of totals. The columns are all requests, and the requests of each class, phase and priority."""
    groups = _groups(report)
    table = Table("", "all", *groups, title=f"{report['model_id']}, {report['duration']:.2f} s")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, key, form in (
        ("Completed requests", "completed", "d"),
        ("Failed requests", "failed", "d"),
        ("Prompt tokens", "total_input_tokens", ",d"),
        ("Generated tokens", "total_output_tokens", ",d"),
        ("Requests per s", "request_throughput", ".3f"),
        ("Requests per s (goodput)", "request_goodput", ".3f"),
        ("Generated tokens per s", "output_throughput", ",.1f"),
        ("  peak over 5 s", "peak_output_throughput", ",.1f"),
        ("  peak over 1 s", "max_output_tokens_per_s", ",.0f"),
        ("All tokens per s", "total_token_throughput", ",.1f"),
        ("Peak requests in flight", "max_concurrent_requests", "d"),
        ("Preemptions", "preemptions", "d"),
    ):
        if report[key] is not None:
            values = (part[key] for part in (report, *groups.values()))
            table.add_row(name, *("-" if value is None else format(value, form) for value in values))
    return table


def _latencies(report: dict[str, Any], config: MetricsConfig) -> Table:
    percentiles = [f"p{value:g}" for value in config.metric_percentiles]
    table = Table("ms", "requests", "mean", "median", "std", *percentiles)
    for column in table.columns[2:]:
        column.justify, column.overflow = "right", "fold"
    for metric, name in METRICS.items():
        if metric not in config.percentile_metrics:
            continue
        for kind, part in (("all", report), *_groups(report).items()):
            values = [part[f"{figure}_{metric}_ms"] for figure in ("mean", "median", "std", *percentiles)]
            cells = ["-" if value is None else f"{value:,.2f}" for value in values]
            table.add_row(name if kind == "all" else "", kind, *cells)
    return table


def _notes(report: dict[str, Any]) -> list[str]:
    notes = []
    if report["interrupted"]:
        notes.append(
            f"Interrupted: {report['interrupted_requests']} of {report['num_prompts']} planned requests were running."
        )
    if report["shortened_requests"]:
        notes.append(
            f"{report['shortened_requests']} requests of the trace were shortened to the context of "
            f"{report['max_model_len']} tokens."
        )
    if report["max_lateness_ms"] > 100:
        notes.append(
            f"This program was too slow: a request was sent {report['max_lateness_ms']:.0f} ms late, which affects the "
            "results."
        )
    return [*notes, *_instances(report)]


def _transitions(figures: dict[str, Any]) -> list[str]:
    """Return a list with one line: mean latencies during merges and splits, and at other times.

    If there were no merges and splits, the list is empty.
    """
    if not figures["per_hour"]:
        return []

    def text(place: str, name: str) -> str:
        value = figures[place][f"mean_{name}_ms"]
        return "-" if value is None else f"{value:,.1f}"

    values = [f"{name.upper()} {text('during', name)} ms (else {text('outside', name)})" for name in ("ttft", "itl")]
    return [f"Transitions: {figures['per_hour']:.0f} an hour; mean {' and '.join(values)} during them."]


def _instances(report: dict[str, Any]) -> list[str]:
    instances = report["instances"]
    lines = []
    if instances["degrees_over_time"]:
        total = sum(instances["device_seconds"].values())
        shares = [f"TP{degree} {seconds / total:.0%}" for degree, seconds in instances["device_seconds"].items()]
        lines.append(
            f"Instances: merges seen {instances['merges']}, splits {instances['splits']}; "
            f"time of devices: {', '.join(shares)}."
        )
        lines += _transitions(instances["transitions"])
    if instances["problem"]:
        what = "No further samples" if instances["degrees_over_time"] else "No samples"
        lines.append(f"{what} of instances: {instances['problem']}")
    return lines
