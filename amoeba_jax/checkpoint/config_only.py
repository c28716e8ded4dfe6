"""A model without weights, for random weights."""

from pathlib import Path
from typing import Any

from amoeba_jax.json_object import read_json_object


class RandomCheckpoint:
    """The config.json of a directory. The weights are random; for benchmarks and capacity checks."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.config: dict[str, Any] = read_json_object(directory / "config.json")

    def close(self) -> None:
        """Do nothing: no file is open."""
