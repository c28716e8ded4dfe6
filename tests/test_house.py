"""Limit on the length of files. Layers and import cycles are checked by `lint-imports`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("amoeba_jax", "benchmarks", "examples", "kvcache", "pallas_kernels", "serving", "sharding", "tests", "tools")
MAX_LINES = 600


def test_files_are_not_too_long():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") if "_pb2" not in file.name]
    assert files
    lines = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8").count("\n") for file in files}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}
