"""`amoeba doctor`: checks of this machine, with advice for each failure."""

import json
import platform
from dataclasses import asdict
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table

from serving.commands.finding import Finding

DISTRIBUTION = "amoeba-jax"
MARKS = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}


def examine() -> list[Finding]:
    """Run all checks. JAX is started if all dependencies are installed. No file is written."""
    findings = _versions()
    if any(finding.status == "fail" for finding in findings):
        return findings
    # This import fails if a dependency is missing or too old.
    from serving.commands.host_checks import HOST_CHECKS

    return findings + [check() for check in HOST_CHECKS]


def print_findings(findings: list[Finding], as_json: bool) -> None:
    """Print the findings on stdout, as a table or as a JSON object with the keys `ok` and `checks`."""
    failed = sum(finding.status == "fail" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [asdict(finding) for finding in findings]}, indent=2))
        return
    table = Table("check", "", "found", "what to do")
    for finding in findings:
        table.add_row(finding.name, MARKS[finding.status], finding.detail, finding.advice)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{failed} of {len(findings)} checks failed." if failed else "All checks passed.")


def _versions() -> list[Finding]:
    """Check that Python and the dependencies have the versions that this package requires."""
    try:
        declared = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        advice = "run `pip install -e .` in the repository"
        detail = f"{DISTRIBUTION} is not installed, so its supported versions are unknown"
        return [Finding("package", "fail", detail, advice)]
    wanted = SpecifierSet(declared["Requires-Python"])
    python = platform.python_version()
    fits = wanted.contains(python, prereleases=True)
    findings = [_ranged("Python", python, wanted, fits, f"use a Python {wanted}")]
    for line in declared.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            findings.append(_dependency(requirement))
    return [*findings, _jaxlib()]


def _dependency(requirement: Requirement) -> Finding:
    advice = f'pip install "{requirement.name}{requirement.specifier}"'
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Finding(requirement.name, "fail", "not installed", advice)
    fits = requirement.specifier.contains(version, prereleases=True)
    return _ranged(requirement.name, version, requirement.specifier, fits, advice)


def _ranged(name: str, version: str, wanted: SpecifierSet, fits: bool, advice: str) -> Finding:
    return Finding(name, "ok" if fits else "fail", f"{version} (supported: {wanted})", "" if fits else advice)


def _jaxlib() -> Finding:
    jax, jaxlib = (_version_or_none(name) for name in ("jax", "jaxlib"))
    if jax == jaxlib:
        return Finding("jaxlib", "ok", f"{jaxlib}, equal to jax")
    return Finding("jaxlib", "warn", f"{jaxlib} with jax {jax}", f'pip install "jaxlib=={jax}"')


def _version_or_none(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
