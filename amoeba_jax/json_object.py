"""JSON files in the directory of a model."""

import json
from pathlib import Path
from typing import Any

from amoeba_jax.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `CheckpointError` if the file is missing or has no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it must hold a JSON object")
    return content
