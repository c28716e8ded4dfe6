"""Limits on the length of files and on the time of property tests. `lint-imports` checks layers and import cycles."""

from pathlib import Path

import hypothesis

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("amoeba_jax", "benchmarks", "examples", "kvcache", "pallas_kernels", "serving", "sharding", "tests", "tools")
MAX_LINES = 600


def test_files_are_not_too_long():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") if "_pb2" not in file.name]
    assert files
    lines = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8").count("\n") for file in files}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_property_tests_have_no_deadline():
    """An example may take longer than 200 ms, the default limit of hypothesis, on a slow machine."""
    assert hypothesis.settings().deadline is None
