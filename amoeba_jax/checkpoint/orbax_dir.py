"""Save and restore of the loaded form: the chunks as devices hold them, through orbax."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from amoeba_jax.checkpoint.resolve import ORBAX_MARKER
from amoeba_jax.engine.weights import LoadChunks, WeightStore
from amoeba_jax.errors import CheckpointError
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from sharding.params import ParamSpec

_FORMAT = 2
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
)
_TOKENIZER_FILES += ("chat_template.jinja",)


def save(directory: Path, store: WeightStore, config: dict[str, Any], tokenizer_directory: Path | None) -> None:
    """Write the loaded form: chunks with orbax, the model's config, how it was chunked, and the tokenizer files.

    Raises `CheckpointError` if the directory exists and is not empty.
    """
    directory = directory.expanduser().resolve()
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} exists and is not empty: choose a new directory to save to")
    directory.mkdir(parents=True, exist_ok=True)
    chunks = {
        _leaf(name, index): store.any_chunk(name, index)
        for name, (_, spec) in store.specs.items()
        for index in range(spec.num_chunks)
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "chunks", chunks)
    for name in _TOKENIZER_FILES:
        if tokenizer_directory is not None and (tokenizer_directory / name).exists():
            shutil.copy(tokenizer_directory / name, directory / name)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    layout = dataclasses.asdict(store.dims)
    # Last: its presence says that everything before it is complete.
    (directory / ORBAX_MARKER).write_text(json.dumps({"format": _FORMAT, "layout": layout}, indent=2))


class OrbaxCheckpoint:
    """A directory written by `save`. Chunks load as they are, or are cut anew for another layout."""

    def __init__(self, directory: Path):
        self.directory = directory
        marker, self.config = _read_json(directory / ORBAX_MARKER), _read_json(directory / "config.json")
        if marker.get("format") != _FORMAT:
            raise CheckpointError(
                f"{directory} has checkpoint format {marker.get('format')!r}; this version reads {_FORMAT}"
            )
        config, layout = ModelConfig.from_hf(self.config), dict(marker.get("layout") or {})
        saved, now = layout.pop("config", {}), json.loads(json.dumps(dataclasses.asdict(config)))
        differing = [key for key in now if saved.get(key) != now[key]]
        if differing:
            raise CheckpointError(
                f"{directory}: config.json is not the one that the chunks were saved with: {', '.join(differing)} "
                "differ, so config and weights disagree"
            )
        try:
            self.saved_dims = ModelDims(config, **layout)
        except TypeError as error:
            raise CheckpointError(f"{directory / ORBAX_MARKER} is damaged: {error}") from error
        self._specs = model_specs(self.saved_dims)
        self._checkpointer = ocp.PyTreeCheckpointer()
        self._sources = {source.name: (spec, source) for _, spec in self._specs.values() for source in spec.sources}

    def reader(self, dims: ModelDims) -> LoadChunks:
        """Chunks for an engine of these dims: read straight if saved in the same layout, else cut anew."""
        if dims == self.saved_dims:
            return self._read_chunks

        def read(name: str) -> np.ndarray:
            spec, source = self._sources[name]
            return spec.restore_tensor(source, self._read_chunks(spec))

        return lambda spec: spec.build_chunks(read, jax.numpy.dtype(dims.dtype))

    def release(self) -> None:
        """Nothing is kept between reads."""

    def close(self) -> None:
        self._checkpointer.close()

    def _read_chunks(self, spec: ParamSpec) -> list[np.ndarray]:
        """Only this parameter's chunks, as host arrays."""
        as_array = ocp.RestoreArgs(restore_type=np.ndarray)
        wanted = {_leaf(spec.name, index): as_array for index in range(spec.num_chunks)}
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=wanted, partial_restore=True)
        try:
            restored = self._checkpointer.restore(self.directory / "chunks", args=args)
        except Exception as error:  # orbax and tensorstore raise many kinds for missing and damaged files
            raise CheckpointError(f"{self.directory}: {spec.name} cannot be read: {error}") from error
        chunks = [np.asarray(restored[leaf]) for leaf in wanted]
        for chunk in chunks:
            if chunk.shape != spec.stored_shape:
                raise CheckpointError(
                    f"{self.directory}: a chunk of {spec.name} has shape {chunk.shape}, expected {spec.stored_shape}"
                )
        return chunks


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it must hold a JSON object")
    return content


def _leaf(name: str, index: int) -> str:
    return f"{name}.{index}"
