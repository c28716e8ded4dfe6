"""Hugging Face model directories with safetensors weights, in one file or in shards."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from amoeba_jax.checkpoint.base import MappedFile
from amoeba_jax.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class Entry(NamedTuple):
    """Position, dtype and shape of one stored tensor.

    Attributes:
        shard: name of the file that holds the tensor.
        dtype: dtype in the notation of safetensors, such as `BF16`.
        shape: shape of the tensor.
        offset: offset in the file, in bytes.
    """

    shard: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsCheckpoint:
    """Weights of a Hugging Face model directory, as a `Checkpoint`.

    The constructor reads `config.json` and the headers of all files. Tensors are views of the mapped files.

    Raises `CheckpointError` in the constructor if a file is missing, truncated or corrupt.
    """

    def __init__(self, directory: Path):
        self.directory: Path | None = directory
        self._root = directory
        self.config: dict[str, Any] = _read_json(directory / "config.json", "Hugging Face model directory")
        self._entries: dict[str, Entry] = {}
        self._files: dict[str, MappedFile] = {}
        self._source = _weights_file(directory, self.config)
        # Several shards may have a tensor of the same name. As in `transformers`, the last shard by name wins.
        for shard, tensors in sorted(_shards(directory, self._source).items()):
            path = directory / shard
            found = _read_header(path)
            if missing := sorted(tensors - found.keys()):
                raise CheckpointError(
                    f"{path} has no tensor {missing[0]!r}, which {self._source} places there "
                    f"({len(missing)} of {len(tensors)} missing): download the shard and the index again"
                )
            self._entries |= found
            self._files[shard] = MappedFile(path)

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor from the file header."""
        return self._entry(name).shape

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in its stored dtype. Raises `CheckpointError` for integer and quantized dtypes."""
        entry = self._entry(name)
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {name!r} in {self._root / entry.shard} has dtype {entry.dtype}, "
                f"but only {', '.join(DTYPES)} can be loaded: convert the checkpoint to bfloat16"
            )
        return self._files[entry.shard].view(name, DTYPES[entry.dtype], entry.shape, entry.offset)

    def read_bytes(self, name: str) -> np.ndarray:
        """Return a tensor of dtype U8. Raises `CheckpointError` for other dtypes."""
        entry = self._entry(name)
        if entry.dtype != "U8":
            raise CheckpointError(f"tensor {name!r} in {self._root / entry.shard} has dtype {entry.dtype}, not U8")
        return self._files[entry.shard].view(name, np.dtype(np.uint8), entry.shape, entry.offset)

    def release(self, name: str | None = None) -> None:
        if name is not None:
            entry = self._entry(name)
            itemsize = DTYPES.get(entry.dtype, np.dtype(np.uint8)).itemsize
            self._files[entry.shard].release(entry.offset, math.prod(entry.shape) * itemsize)
            return
        for file in self._files.values():
            file.release()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(
                f"no tensor {name!r} in {self._root / self._source} ({len(self._entries)} tensors): "
                f"the weights do not belong to this config.json"
            )
        return self._entries[name]


def stored_dtype(directory: Path, config: dict[str, Any]) -> str | None:
    """Return the common dtype of all matrices in the safetensors files of a directory.

    Return None if the matrices have different or unsupported dtypes, or if there are no readable files. Vectors are
    ignored, because models often keep norms and tables of angles in float32. Packed MXFP4 weights are ignored too.
    """
    found: set[str] = set()
    try:
        for shard in _shards(directory, _weights_file(directory, config)):
            found |= {entry.dtype for entry in _read_header(directory / shard).values() if len(entry.shape) > 1}
        found.discard("U8")
    except CheckpointError:  # loading the weights raises it again
        return None
    return DTYPES[found.pop()].name if len(found) == 1 and found <= DTYPES.keys() else None


def _weights_file(directory: Path, config: dict[str, Any]) -> str:
    """Return the name of the file to load: a single weights file, or the index of several weights files.

    As in `transformers`, the first choice is the file that config.json names with the key `transformers_weights`. The
    second choice is `model.safetensors`, and the third choice is the index.

    Raises `CheckpointError` if the named file is missing, or if there is no file to load.
    """
    named = config.get("transformers_weights")
    if named is not None:
        plain = isinstance(named, str) and Path(named).name == named
        if not plain or not named.endswith((SUFFIX, INDEX_SUFFIX)) or not (directory / named).is_file():
            raise CheckpointError(
                f"{directory / 'config.json'}: transformers_weights={named!r} is not the name of a {SUFFIX} or "
                f"{INDEX_SUFFIX} file in this directory"
            )
        return named
    for name in (WEIGHTS, INDEX):
        if (directory / name).is_file():
            return name
    if pickled := sorted(directory.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{directory} holds only pickled weights ({pickled[0].name}), which can run code and are not "
            f"read: convert them to safetensors (transformers: model.save_pretrained(directory))"
        )
    if ggufs := sorted(directory.glob("*.gguf")):
        raise CheckpointError(f"{directory} holds a GGUF file: give the path of the file itself, {ggufs[0]}")
    raise CheckpointError(f"{directory} holds no weights: expected {WEIGHTS}, or {INDEX} and its shards")


def _shards(directory: Path, source: str) -> dict[str, set[str]]:
    """Return the tensor names of each weights file, as a dict from file name to tensor names.

    `source` is an index of weights files, or a single weights file. For a single file, the set of names is empty.

    Raises `CheckpointError` if the index is damaged or a weights file is missing.
    """
    if not source.endswith(INDEX_SUFFIX):
        return {source: set()}
    weight_map = _read_json(directory / source, "sharded checkpoint").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / source} has no weight_map: download the index again")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        # An index names plain files; a path would read outside the model's directory.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{directory / source} places {name!r} in {shard!r}, which is not a file name")
        shards.setdefault(shard, set()).add(name)
    if absent := sorted(shard for shard in shards if not (directory / shard).is_file()):
        raise CheckpointError(
            f"{directory} lacks {absent[0]} ({len(absent)} of {len(shards)} shards missing), "
            f"which {source} names: download the missing shards"
        )
    return shards


def _read_header(path: Path) -> dict[str, Entry]:
    """Return the entries of one safetensors file, by tensor name.

    Raises `CheckpointError` if the header is damaged, or does not agree with the size of the file.
    """
    actual = path.stat().st_size
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise CheckpointError(_describe_damage(path, actual, str(error))) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: Entry(path.name, spec["dtype"], tuple(spec["shape"]), 8 + length + spec["data_offsets"][0])
        for name, spec in header.items()
    }


def _describe_damage(path: Path, actual: int, reason: str) -> str:
    """Return an error message about a damaged file of `actual` bytes.

    The message names the correct size of the file if the size is known.
    """
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        text = file.read(length) if length <= actual else b""
    if len(start) < 8 or length > actual - 8:
        # The header ends beyond the file: a truncated file, or another format.
        return (
            f"{path} is truncated or not a safetensors file: its {actual} bytes end inside the header "
            f"({reason}): download it again"
        )
    try:
        specs = [spec for name, spec in json.loads(text).items() if name != "__metadata__"]
        expected = 8 + length + max((spec["data_offsets"][1] for spec in specs), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"{path} has a corrupt header ({reason}): download it again"
    if expected != actual:
        state = "truncated" if actual < expected else "followed by stray bytes"
        return f"{path} is {state}: expected {expected} bytes, found {actual}: download it again"
    return f"{path} is damaged ({reason}): download it again"


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a {what}: it has no {path.name}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, not an object: download it again")
    return content
