"""Tables of results for the terminal."""

from collections.abc import Mapping, Sequence
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


def policies_table(results: Mapping[str, PolicyResult], title: str) -> Table:
    """Return a table with a row for each policy. If there are several classes of requests, each policy also has a row
    for each class."""
    table = Table("policy", *(name for name, _, _ in _COLUMNS), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, result in results.items():
        report = result.report()
        table.add_row(name, *_cells(report))
        for kind, part in report["classes"].items():
            table.add_row(f"  {kind}", *_cells(part), style="dim")
    return table


def _cells(report: Mapping[str, Any]) -> list[str]:
    values = [(report.get(key), form) for _, key, form in _COLUMNS]
    return ["" if value is None else format(value, form) for value, form in values]


def answers_table(answers: Sequence[Answer], what: str) -> Table:
    """Return a table with the result of each search. `what`: heading of the column of values."""
    table = Table("policy", what, "runs", "note")
    for answer in answers:
        value = "none" if answer.value is None else f"{answer.value:,.4g}"
        note = "the search ended at its limit" if answer.at_limit else ""
        table.add_row(answer.policy, value, str(len(answer.trials)), note)
    return table
