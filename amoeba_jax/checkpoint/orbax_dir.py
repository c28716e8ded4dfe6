"""Checkpoints written by `LLM.save`: the weight shards of the devices, in orbax's format."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from amoeba_jax.checkpoint.base import FillShards
from amoeba_jax.checkpoint.resolve import ORBAX_MARKER
from amoeba_jax.errors import CheckpointError
from amoeba_jax.json_object import read_json_object
from amoeba_jax.models.config import ModelConfig, RopeConfig
from amoeba_jax.models.decoder import model_specs
from amoeba_jax.models.dims import ModelDims
from sharding.params import ParamSpec

FORMAT = 4
SHARDS = "shards"
"""Name of the subdirectory with the shards."""


class OrbaxCheckpoint:
    """Checkpoint written by `LLM.save`. Its weight shards have the sizes that the saving engine used.

    If the loading engine uses other sizes (`ModelDims`), `reader` converts the shards.

    Raises `CheckpointError` if the directory has another format or is damaged, or if its `config.json` was changed.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        marker, self.config = read_json_object(directory / ORBAX_MARKER), read_json_object(directory / "config.json")
        if marker.get("format") != FORMAT:
            raise CheckpointError(
                f"{directory} has checkpoint format {marker.get('format')!r}; this version reads {FORMAT}"
            )
        config, layout = ModelConfig.from_hf(self.config), dict(marker.get("layout") or {})
        saved, now = _with_defaults(layout.pop("config", {}), ModelConfig), _plain(dataclasses.asdict(config))
        for key in ("rope", "local_rope"):
            if isinstance(saved.get(key), dict):
                saved[key] = _with_defaults(saved[key], RopeConfig)
        if isinstance(rope := saved.get("rope"), dict):
            rope["long"] = config.rope.long  # a setting of the engine that saved, not of the model
        differing = [key for key in now if saved.get(key) != now[key]]
        if differing:
            raise CheckpointError(
                f"{directory}: config.json is not the config of the saved shards: {', '.join(differing)} differ"
            )
        try:
            layout["expert_order"] = tuple(tuple(row) for row in layout.get("expert_order", ()))
            self.saved_dims = ModelDims(config, **layout)
        except TypeError as error:
            raise CheckpointError(f"{directory / ORBAX_MARKER} is damaged: {error}") from error
        self._specs = model_specs(self.saved_dims)
        self._sources = {source.name: (spec, source) for spec in self._specs.values() for source in spec.sources}
        self._context = ts.Context({"file_io_mode": {"mode": "memmap"}})

    def reader(self, dims: ModelDims) -> FillShards:
        """Return a function that fills the weight shards of an engine whose sizes are `dims`.

        If `dims` equals the saved sizes, the function copies the stored shards. If not, the function rebuilds each
        checkpoint tensor from the stored shards, and divides the tensor into new shards.
        """
        if dims == self.saved_dims:
            return self._read_shards

        def fill(spec: ParamSpec, shards: list[np.ndarray]) -> None:
            saved: dict[str, list[np.ndarray]] = {}

            def read(name: str) -> np.ndarray:
                other, source = self._sources[name]
                if other.name not in saved:
                    dtype = jax.numpy.dtype(self.saved_dims.dtype)
                    saved[other.name] = [np.empty(other.stored_shape, dtype) for _ in range(other.num_shards)]
                    self._read_shards(other, saved[other.name])
                return other.restore_tensor(source, saved[other.name])

            spec.fill_shards(read, shards)

        return fill

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""

    def _read_shards(self, spec: ParamSpec, shards: list[np.ndarray]) -> None:
        """Copy the stored shards of a parameter from memory-mapped files into `shards`.

        Raises `CheckpointError` if a shard cannot be read or has another shape or dtype.
        """
        opened = [self._open_shard(spec, index) for index in range(spec.num_shards)]
        for index, (stored, shard) in enumerate(zip(opened, shards, strict=True)):
            path = self.directory / SHARDS / shard_name(spec.name, index)
            try:
                array = stored.result()
                found = (tuple(array.shape), array.dtype.numpy_dtype)
                if found == (shard.shape, shard.dtype):
                    ts.array(shard).write(array).result()
                    continue
            except (ValueError, OSError) as error:
                raise CheckpointError(f"{path}, a shard of {spec.name}, cannot be read: {error}") from error
            raise CheckpointError(
                f"{path}, a shard of {spec.name}, has shape {found[0]} and dtype {found[1]}, expected {shard.shape} "
                f"and {shard.dtype}"
            )

    def _open_shard(self, spec: ParamSpec, index: int) -> "ts.Future[ts.TensorStore]":
        path = self.directory / SHARDS / shard_name(spec.name, index)
        # Without the last setting, a missing file would be read as zeros.
        files = {"driver": "file", "path": f"{path}/"}
        store = {"driver": "zarr", "kvstore": files, "fill_missing_data_reads": False}
        return ts.open(store, open=True, read=True, context=self._context)


def _with_defaults(saved: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the saved fields of the dataclass `kind`. Fields that were not saved get their defaults."""
    defaults = {it.name: it.default for it in dataclasses.fields(kind) if it.default is not dataclasses.MISSING}
    return _plain(defaults) | saved


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Write the fields as JSON and read them again. Tuples become lists."""
    return json.loads(json.dumps(fields))


def shard_name(name: str, index: int) -> str:
    """Return the file name of shard number `index` of the parameter `name`."""
    return f"{name}.{index}"
