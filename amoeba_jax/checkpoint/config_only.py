"""A model that is only a config: its weights are drawn at random."""

import json
from pathlib import Path
from typing import Any

from amoeba_jax.errors import CheckpointError


class RandomCheckpoint:
    """The config.json of a directory that need hold nothing else. For benchmarks and capacity checks."""

    def __init__(self, directory: Path):
        self.directory = directory
        path = directory / "config.json"
        try:
            self.config: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def close(self) -> None:
        """Nothing is open."""
