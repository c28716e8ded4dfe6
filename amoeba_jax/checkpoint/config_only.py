"""Model directories without weights. The engine then uses random weights."""

from pathlib import Path
from typing import Any

from amoeba_jax.json_object import read_json_object


class RandomCheckpoint:
    """Model directory of which only `config.json` is read. The engine uses random weights, for benchmarks."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.config: dict[str, Any] = read_json_object(directory / "config.json")

    def close(self) -> None:
        """Do nothing: no file is open."""
