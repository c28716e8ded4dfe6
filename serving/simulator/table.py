"""Tables of simulation results for the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from serving.simulator.result import PolicyResult
from serving.simulator.search import Answer

_COLUMNS = (
    ("completed", "completed", "d"),
    ("failed", "failed", "d"),
    ("within SLO", "slo_share", ".1%"),
    ("tokens/s", "output_throughput", ",.1f"),
    ("TTFT p50", "p50_ttft_ms", ",.0f"),
    ("p99 (ms)", "p99_ttft_ms", ",.0f"),
    ("TPOT p50", "p50_tpot_ms", ",.1f"),
    ("p99 (ms)", "p99_tpot_ms", ",.1f"),
    ("ITL p99", "p99_itl_ms", ",.1f"),
    ("queue p99", "p99_queue_ms", ",.0f"),
    ("merges", "merges", "d"),
    ("splits", "splits", "d"),
)
_PRICE = ("$/M tokens", "usd_per_million_tokens", ",.2f")


def policies_table(results: Mapping[str, PolicyResult], title: str, reasons: Mapping[str, str] | None = None) -> Table:
    """Return a table with a row for each policy.

    If there are several classes of requests, each policy also has a row for each class. `reasons` has the policies that
    were not simulated, with the reason why. Their rows say "not possible".
    """
    has_price = any(result.price_per_hour is not None for result in results.values())
    columns = [*_COLUMNS, *([_PRICE] if has_price else [])]
    table = Table("policy", *(name for name, _, _ in columns), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, result in results.items():
        report = result.report()
        table.add_row(name, *_cells(report, columns))
        for kind, part in report["classes"].items():
            table.add_row(f"  {kind}", *_cells(part, columns), style="dim")
    for name in reasons or {}:
        table.add_row(name, "not possible")
    return table


@dataclass(frozen=True)
class SweepPoint:
    """Results of all policies at one request rate."""

    rate: float
    """Mean requests per second."""
    results: Mapping[str, PolicyResult]


def sweep_table(points: Sequence[SweepPoint], title: str) -> Table:
    """Return a table of goodput, share of requests within the latency limits, and price, by request rate and policy.

    Goodput is requests per second within the latency limits.
    """
    names = list(points[0].results)
    table = Table("requests/s", *names, title=title)
    for point in points:
        cells = []
        for result in point.results.values():
            goodput = float(result.kept.sum()) / (result.duration_s or 1.0)
            price = result.usd_per_million_tokens
            cells.append(f"{goodput:.3g} ({result.kept_share:.1%}{'' if price is None else f', ${price:.2f}/M'})")
        table.add_row(f"{point.rate:.3g}", *cells)
    return table


def _cells(report: Mapping[str, Any], columns: Sequence[tuple[str, str, str]]) -> list[str]:
    values = [(report.get(key), form) for _, key, form in columns]
    return ["" if value is None else format(value, form) for value, form in values]


def answers_table(answers: Sequence[Answer], what: str, reasons: Mapping[str, str], price: float | None) -> Table:
    """Return a table with the result of each search.

    Args:
        answers: results of the searches.
        what: heading of the column of values: `devices` or `requests/s`.
        reasons: policies that were not simulated, with the reason why. Their rows say "not possible".
        price: price of a device for an hour in USD. None: unknown.
    """
    priced = price is not None and what == "devices"
    table = Table("policy", what, *(["$/hour"] if priced else []), "runs", "note")
    for answer in answers:
        value = "none" if answer.value is None else f"{answer.value:,.4g}"
        costs = ["" if answer.value is None else f"{answer.value * price:,.2f}"] if price is not None and priced else []
        table.add_row(answer.policy, value, *costs, str(len(answer.trials)), answer.note)
    for name in reasons:
        table.add_row(name, "not possible")
    return table
