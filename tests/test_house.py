"""Limits for the sizes of files and classes, and settings of all tests."""

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import hypothesis

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("amoeba_jax", "benchmarks", "examples", "kvcache", "pallas_kernels", "serving", "sharding", "tests", "tools")
MAX_FILE_LINES, MAX_CLASS_LINES, MAX_MEDIAN_LINES = 400, 250, 150


def source_files() -> Iterator[tuple[str, str]]:
    """Yield name and text of every file that is not generated."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in file.name:
                yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


def test_files_are_short():
    lines = {name: text.count("\n") for name, text in source_files()}
    assert {name for name, count in lines.items() if count > MAX_FILE_LINES} == set()
    assert median(lines.values()) < MAX_MEDIAN_LINES


def test_classes_are_short():
    found = set()
    for name, text in source_files():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                first = min([node.lineno, *(it.lineno for it in node.decorator_list)])
                if node.end_lineno - first + 1 > MAX_CLASS_LINES:
                    found.add(f"{name}: {node.name}")
    assert found == set()


def test_property_tests_have_no_deadline():
    """Examples have no deadline, because a slow machine may exceed any limit."""
    assert hypothesis.settings().deadline is None
    deadlines = set()
    for name, text in source_files():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "settings":
                deadlines |= {name for keyword in node.keywords if keyword.arg == "deadline"}
    assert deadlines == set(), "the profile in tests/conftest.py sets it for all"
