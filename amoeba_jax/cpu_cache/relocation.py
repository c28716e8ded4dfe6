"""Conversion of compiled programs to bytes, and loading on any group with the same number of devices.

Loading takes milliseconds. Compiling takes seconds. JAX's `jax.experimental.serialize_executable` loads a program only
on the devices for which it was compiled. This module uses private parts of JAX 0.10 to 0.12 to load a program on other
devices. If a version of JAX lacks these parts, a warning is logged, and each group of devices compiles its own
programs.

XLA has two limits (JAX 0.10.2). A program that was loaded from bytes cannot be converted to bytes again. A program that
sorts can be converted only once.
"""

import functools
import io
import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PortableProgram:
    """Compiled program as bytes, for any group with the same number of devices. Thread-safe.

    Attributes:
        data: pickled executable, with shapes and shardings of its arguments. A device is stored as its index in the
            group.
        trees: tree structures of the arguments and of the results.
    """

    data: bytes
    trees: tuple[Any, Any]

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, devices: Sequence[jax.Device]) -> "PortableProgram | None":
        """Serialize a program that XLA has just compiled for `devices`. Return None if it cannot be serialized.

        After an unexpected error, this process stops serializing programs (`disable_relocation`).
        """
        if devices[0].platform != "cpu" or not can_relocate():
            return None
        try:
            arguments, in_tree = jax.tree.flatten(compiled.args_info)
            # The type that `serialize_executable.serialize` expects has no public name.
            internal: Any = compiled
            parts = internal._executable._unloaded_executable, arguments, internal._no_kwargs
            file = io.BytesIO()
            _Pickler(file, devices).dump(parts)
            return cls(file.getvalue(), (in_tree, compiled.out_tree))
        except Exception as error:
            disable_relocation(error)
            return None

    def load(self, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
        """Load the program on `devices`. The number of devices must be the same as at compilation.

        Donated arguments and shardings are the same as if the program had been compiled for `devices`. Damaged bytes
        can raise an error of any type.
        """
        executable, arguments, no_kwargs = _Unpickler(self.data, devices).load()
        placed = tuple(executable.xla_executable.local_devices())
        if placed != tuple(devices):  # a call would abort the process
            raise RuntimeError(f"a program for {devices} was loaded for {placed}")
        in_tree, out_tree = self.trees
        return jax.stages.Compiled(executable.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)


@dataclass(frozen=True)
class _PrivateJax:
    """Private classes and functions of JAX that this module uses."""

    executable: type
    device: type
    client: type
    device_list: Callable[[tuple[jax.Device, ...]], Any]
    compile_options: Callable[..., Any]


def disable_relocation(error: Exception) -> None:
    """Stop converting programs to bytes in this process, and log a warning once.

    Each group of devices then compiles its own programs.
    """
    _warn_once(f"{type(error).__name__}: {error}")


def can_relocate() -> bool:
    """Return whether programs can be converted to bytes.

    Return False if JAX lacks the private functions for a conversion, or if a conversion in this process has failed.
    """
    return _private_jax() is not None and not _warn_once.cache_info().currsize


@functools.cache
def _private_jax() -> _PrivateJax | None:
    try:
        from jax._src.compiler import get_compile_options
        from jax._src.lib import xla_client as xc  # pyright: ignore[reportPrivateImportUsage]

        return _PrivateJax(xc.LoadedExecutable, xc.Device, xc.Client, xc.DeviceList, get_compile_options)
    except (ImportError, AttributeError) as error:
        _warn_once(str(error))
        return None


class _Pickler(pickle.Pickler):
    """Pickler of executables, like JAX's own. It stores a device as its index in the group."""

    def __init__(self, file: io.BytesIO, devices: Sequence[jax.Device]):
        super().__init__(file)
        self._ranks = {device: rank for rank, device in enumerate(devices)}

    def persistent_id(self, obj: Any) -> Any:
        private = _private_jax()
        assert private is not None, "relocation is disabled"
        if isinstance(obj, private.executable):
            return "executable", obj.serialize()
        if isinstance(obj, private.device):
            return "device", self._ranks[obj]
        if isinstance(obj, private.client):
            return ("client",)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, devices: Sequence[jax.Device]):
        super().__init__(io.BytesIO(data))
        self._devices = tuple(devices)

    def persistent_load(self, pid: Any) -> Any:
        private, client = _private_jax(), self._devices[0].client
        assert private is not None, "relocation is disabled"
        match pid:
            case ("executable", serialized):
                options = private.compile_options(
                    num_replicas=1,
                    num_partitions=len(self._devices),
                    device_assignment=np.array([[device.id for device in self._devices]]),
                    backend=client,
                )
                return client.deserialize_executable(serialized, private.device_list(self._devices), options)
            case ("device", rank):
                return self._devices[rank]
            case ("client",):
                return client
        raise pickle.UnpicklingError(f"unknown reference {pid[0]!r}")


@functools.cache
def _warn_once(why: str) -> None:
    logger.warning(
        "programs are compiled for each group of devices, which takes longer: JAX %s cannot write them as bytes (%s)",
        jax.__version__,
        why,
    )
