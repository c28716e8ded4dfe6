"""Search for a model by its name or path."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import snapshot_download

from amoeba_jax.checkpoint.base import Checkpoint
from amoeba_jax.checkpoint.default_model import DEFAULT_MODEL, ensure_default_model
from amoeba_jax.checkpoint.gguf_file import open_gguf
from amoeba_jax.checkpoint.safetensors_file import SafetensorsCheckpoint
from amoeba_jax.errors import CheckpointError, ModelNotFoundError

ORBAX_MARKER = "amoeba.json"
"""File that marks a directory as a checkpoint of `LLM.save`."""

HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.txt"]
# The same weights in another format.
_OTHER_FORMS = ["consolidated*", "original/*"]

FORMS = (
    f"Accepted: {DEFAULT_MODEL!r} (built in), a directory in Hugging Face form, a .gguf file, "
    f"a directory of `LLM.save`, or a hub name such as 'Qwen/Qwen3-0.6B'"
)


@dataclass(frozen=True)
class ResolvedModel:
    """Name, path and format of a model that was found on this machine."""

    name: str
    """Name of the model for clients: the last part of the path or hub name."""
    path: Path
    """Directory, or the file if `kind` is "gguf"."""
    kind: Literal["safetensors", "gguf", "orbax"]
    """Format of the weights."""


def resolve_model(model: str, *, revision: str | None = None) -> ResolvedModel:
    """Find a model by its name or path. Download the model from the hub if needed.

    `model` is the name of the default model, a path or a hub name. If `model` is both an existing path and a hub name,
    the path is used.

    Raises `ModelNotFoundError`, with a list of the accepted forms, if no model is found.
    """
    if model == DEFAULT_MODEL:
        return ResolvedModel(DEFAULT_MODEL, ensure_default_model(), "safetensors")
    path = Path(os.path.abspath(Path(model).expanduser()))
    if path.is_dir() and model:
        kind = "orbax" if (path / ORBAX_MARKER).is_file() else "safetensors"
        return ResolvedModel(path.name, path, kind)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is neither a directory nor a .gguf file. {FORMS}")
        return ResolvedModel(path.name, path, "gguf")
    if path.suffix == ".gguf" or not re.fullmatch(r"\w([\w.-]*\w)?/\w([\w.-]*\w)?", model):
        raise ModelNotFoundError(f"there is no model {model!r}: no file or directory {path}. {FORMS}")
    return ResolvedModel(model.split("/")[1], _download(model, revision), "safetensors")


def open_checkpoint(model: str, *, revision: str | None = None) -> Checkpoint:
    """Find a model by its name or path, like `resolve_model`, and open its weights.

    Raises:
        ModelNotFoundError: the model is not found.
        CheckpointError: the model is damaged, or it was written by `LLM.save` (use `OrbaxCheckpoint`).
    """
    return open_resolved(resolve_model(model, revision=revision))


def open_resolved(resolved: ResolvedModel) -> Checkpoint:
    """Open the weights of a model that `resolve_model` has found. See `open_checkpoint`."""
    if resolved.kind == "orbax":
        raise CheckpointError(
            f"{resolved.path} is a checkpoint of `LLM.save`, without separate tensors: open it with `LLM`"
        )
    if resolved.kind == "gguf":
        return open_gguf(resolved.path)
    return SafetensorsCheckpoint(resolved.path)


def _download(repository: str, revision: str | None) -> Path:
    """Return the directory with the files of a hub repository. Download files that the hub's cache lacks.

    Raises `ModelNotFoundError` if the download fails.
    """
    try:
        found = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=HUB_FILES,
            ignore_patterns=_OTHER_FORMS,
            etag_timeout=5,
        )
    except Exception as error:  # the hub client also raises errors of its transport
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFoundError(
            f"{repository!r} is not a file or directory here, and the hub did not return it{at}: {reason}. {FORMS}"
        ) from error
    return Path(found)
