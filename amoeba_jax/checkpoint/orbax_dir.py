"""Save and restore of the loaded form: the chunks as devices hold them, through orbax."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from amoeba_jax.checkpoint.resolve import ORBAX_MARKER
from amoeba_jax.engine.loading import FillChunks
from amoeba_jax.engine.weights import WeightStore
from amoeba_jax.errors import CheckpointError
from amoeba_jax.models.config import ModelConfig
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from sharding.params import ParamSpec

_FORMAT = 3
_CHUNKS = "chunks"
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
    # One plain file a chunk: with zstd and OCDBT, orbax's defaults, reading takes about 4 times as long.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory / _CHUNKS, args=ocp.args.PyTreeSave(chunks))
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
        self._sources = {source.name: (spec, source) for _, spec in self._specs.values() for source in spec.sources}
        self._context = ts.Context({"file_io_mode": {"mode": "memmap"}})

    def reader(self, dims: ModelDims) -> FillChunks:
        """Chunks for an engine of these dims: read straight if saved in the same layout, else cut anew."""
        if dims == self.saved_dims:
            return self._read_chunks

        def fill(spec: ParamSpec, chunks: list[np.ndarray]) -> None:
            saved: dict[str, list[np.ndarray]] = {}

            def read(name: str) -> np.ndarray:
                other, source = self._sources[name]
                if other.name not in saved:
                    dtype = jax.numpy.dtype(self.saved_dims.dtype)
                    saved[other.name] = [np.empty(other.stored_shape, dtype) for _ in range(other.num_chunks)]
                    self._read_chunks(other, saved[other.name])
                return other.restore_tensor(source, saved[other.name])

            spec.fill_chunks(read, chunks)

        return fill

    def close(self) -> None:
        """Nothing is open between reads."""

    def _read_chunks(self, spec: ParamSpec, chunks: list[np.ndarray]) -> None:
        """Copy this parameter's chunks from their files, memory-mapped, into host memory.

        By tensorstore, through which orbax itself stores arrays: a restore by orbax takes 20 to 35 ms, however little
        it reads, and new memory for every array.
        """
        opened = [self._open_chunk(spec, index) for index in range(spec.num_chunks)]
        for index, (stored, chunk) in enumerate(zip(opened, chunks, strict=True)):
            path = self.directory / _CHUNKS / _leaf(spec.name, index)
            try:
                array = stored.result()
                found = (tuple(array.shape), array.dtype.numpy_dtype)
                if found == (chunk.shape, chunk.dtype):
                    ts.array(chunk).write(array).result()
                    continue
            except (ValueError, OSError) as error:
                raise CheckpointError(f"{path}, a chunk of {spec.name}, cannot be read: {error}") from error
            raise CheckpointError(
                f"{path}, a chunk of {spec.name}, has shape {found[0]} and dtype {found[1]}, expected {chunk.shape} "
                f"and {chunk.dtype}"
            )

    def _open_chunk(self, spec: ParamSpec, index: int) -> "ts.Future[ts.TensorStore]":
        path = self.directory / _CHUNKS / _leaf(spec.name, index)
        # Without the last setting a file that is missing would be read as zeros.
        files = {"driver": "file", "path": f"{path}/"}
        store = {"driver": "zarr", "kvstore": files, "fill_missing_data_reads": False}
        return ts.open(store, open=True, read=True, context=self._context)


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
