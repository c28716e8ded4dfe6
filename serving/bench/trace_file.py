"""Traces of real traffic: how long requests were, and when they came."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from amoeba_jax.errors import ConfigError

_LENGTHS = ("input_tokens", "output_tokens")


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival: `input_tokens` and `output_tokens` int64, `arrival_s` float64 seconds
    from the first one, or None where the file has no times."""

    input_tokens: np.ndarray
    output_tokens: np.ndarray
    arrival_s: np.ndarray | None


def read_trace(path: Path) -> Trace:
    """A trace in a .npz file with the arrays `input_tokens` and `output_tokens` (integers, one for each request) and
    possibly `arrival_s` (seconds). Raises `ConfigError` for a file that is not one.
    """
    arrays = _read_arrays(path)
    lengths = [arrays[name] for name in _LENGTHS]
    for name, values in zip(_LENGTHS, lengths, strict=True):
        if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iu":
            raise ConfigError(
                f"{name} of the trace {path} is {values.dtype} of shape {values.shape}: it must be a list of integers"
            )
        if values.size != lengths[0].size:
            raise ConfigError(f"{name} of the trace {path} has {values.size} values, input_tokens {lengths[0].size}")
        if values.min() < 0:
            raise ConfigError(f"{name} of the trace {path} has {values.min()}: no length may be below 0")
    inputs, outputs = (values.astype(np.int64) for values in lengths)
    if "arrival_s" not in arrays:
        return Trace(inputs, outputs, None)
    times = arrays["arrival_s"]
    if times.shape != inputs.shape or times.dtype.kind not in "iuf" or not np.isfinite(times).all():
        raise ConfigError(
            f"arrival_s of the trace {path} is {times.dtype} of shape {times.shape}: "
            f"it must be {inputs.size} finite numbers, one for each request"
        )
    order = np.argsort(times, kind="stable")
    times = times[order].astype(np.float64)
    return Trace(inputs[order], outputs[order], times - times[0])


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ConfigError(f"the trace {path} is a single array: it must be a .npz file with named ones")
        with file:
            missing = [name for name in _LENGTHS if name not in file.files]
            if missing:
                has = ", ".join(sorted(file.files)) or "nothing"
                raise ConfigError(f"the trace {path} has no {' and no '.join(missing)}: it has {has}")
            return {name: file[name] for name in (*_LENGTHS, "arrival_s") if name in file.files}
    except ConfigError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"the trace {path} cannot be read as a .npz file: {error}") from error
