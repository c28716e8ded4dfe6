"""From what a user calls a model to its files."""

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
"""The file that marks a directory as a checkpoint that amoeba saved."""

HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.txt"]
# The same weights again, in the form of their makers.
_OTHER_FORMS = ["consolidated*", "original/*"]

FORMS = (
    f"Accepted: {DEFAULT_MODEL!r} (built in), a directory in Hugging Face form, a .gguf file, "
    f"a directory that amoeba saved, or a hub name such as 'Qwen/Qwen3-0.6B'"
)


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model lies on this computer."""

    name: str
    """What clients call it: the last part of the path or hub name."""
    path: Path
    """A directory, or a file for "gguf"."""
    kind: Literal["safetensors", "gguf", "orbax"]
    """How its weights are stored."""


def resolve_model(model: str, *, revision: str | None = None) -> ResolvedModel:
    """Find `model`: the default model's name, a path, or a hub name (downloaded, at `revision`).

    A path that exists comes before a hub name. Raises `ModelNotFoundError`, listing what is accepted.
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
    """Open the weights of `model` (see `resolve_model`), tensor by tensor.

    Raises `ModelNotFoundError` if it is not found, `CheckpointError` if it is damaged or is a checkpoint that
    amoeba saved, which is restored as a whole from `ResolvedModel.path` instead.
    """
    return open_resolved(resolve_model(model, revision=revision))


def open_resolved(resolved: ResolvedModel) -> Checkpoint:
    """`open_checkpoint` for a model that `resolve_model` has found."""
    if resolved.kind == "orbax":
        raise CheckpointError(f"{resolved.path} was saved by amoeba: restore it as a whole, not tensor by tensor")
    if resolved.kind == "gguf":
        return open_gguf(resolved.path)
    return SafetensorsCheckpoint(resolved.path)


def _download(repository: str, revision: str | None) -> Path:
    """The hub's files of `repository`, from the hub's own cache where they are there already."""
    try:
        found = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=HUB_FILES,
            ignore_patterns=_OTHER_FORMS,
            etag_timeout=5,
        )
    except Exception as error:  # besides its own errors, the hub client lets those of its transport through
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFoundError(
            f"{repository!r} is no file or directory here, and the hub did not give it{at}: {reason}. {FORMS}"
        ) from error
    return Path(found)
