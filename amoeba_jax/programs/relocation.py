"""Compiled programs as bytes, which load on any group of as many devices: milliseconds, where compiling takes seconds.

JAX has no public way to do that: `jax.experimental.serialize_executable` loads a program for the devices that it was
compiled for. This takes the same steps with another device assignment. What it needs of JAX is looked up once; where it
is not as it was with JAX 0.10 to 0.12, programs are compiled for each group of devices, and a warning says so.

Two limits of XLA's, with JAX 0.10.2: of a program that was loaded from bytes no bytes can be had again (what is
loaded from such bytes lacks its functions), and of one with a sort they can be had once.
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
    """A compiled program for any devices. May be used by several threads.

    Attributes:
        data: its executable, avals and shardings, in which devices are ranks.
        trees: structures of its arguments and results.
    """

    data: bytes
    trees: tuple[Any, Any]

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, devices: Sequence[jax.Device]) -> "PortableProgram | None":
        """A program that XLA has just compiled for these devices; None where that cannot be done."""
        if devices[0].platform != "cpu" or not is_possible():
            return None
        try:
            arguments, in_tree = jax.tree.flatten(compiled.args_info)
            # What `serialize_executable.serialize` takes; the type has no public name.
            internal: Any = compiled
            parts = internal._executable._unloaded_executable, arguments, internal._no_kwargs
            file = io.BytesIO()
            _Pickler(file, devices).dump(parts)
            return cls(file.getvalue(), (in_tree, compiled.out_tree))
        except Exception as error:
            give_up(error)
            return None

    def load(self, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
        """The program on devices, as many as it was compiled for. Raises whatever reading damaged bytes does.

        Buffers are donated, and arguments and results sharded, as those of a program that was compiled for them.
        """
        executable, arguments, no_kwargs = _Unpickler(self.data, devices).load()
        placed = tuple(executable.xla_executable.local_devices())
        if placed != tuple(devices):  # calling it would end the process
            raise RuntimeError(f"a program for {devices} was loaded for {placed}")
        in_tree, out_tree = self.trees
        return jax.stages.Compiled(executable.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)


@dataclass(frozen=True)
class _Formats:
    """What this needs of JAX, in places where JAX promises nothing."""

    executable: type
    device: type
    client: type
    device_list: Callable[[tuple[jax.Device, ...]], Any]
    compile_options: Callable[..., Any]


def give_up(error: Exception) -> None:
    """Something that this needs of JAX is not as it was: programs are compiled from here on, and a warning says so."""
    _say_once(f"{type(error).__name__}: {error}")


def is_possible() -> bool:
    """Whether JAX has all that this needs, as far as is known."""
    return _formats() is not None and not _say_once.cache_info().currsize


@functools.cache
def _formats() -> _Formats | None:
    try:
        from jax._src.compiler import get_compile_options
        from jax._src.lib import xla_client as xc  # pyright: ignore[reportPrivateImportUsage]

        return _Formats(xc.LoadedExecutable, xc.Device, xc.Client, xc.DeviceList, get_compile_options)
    except (ImportError, AttributeError) as error:
        _say_once(str(error))
        return None


class _Pickler(pickle.Pickler):
    """As JAX's own: executables, devices and clients are references. A device is its rank."""

    def __init__(self, file: io.BytesIO, devices: Sequence[jax.Device]):
        super().__init__(file)
        self._ranks = {device: rank for rank, device in enumerate(devices)}

    def persistent_id(self, obj: Any) -> Any:
        formats = _formats()
        assert formats is not None, "it was looked up before"
        if isinstance(obj, formats.executable):
            return "executable", obj.serialize()
        if isinstance(obj, formats.device):
            return "device", self._ranks[obj]
        if isinstance(obj, formats.client):
            return ("client",)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, devices: Sequence[jax.Device]):
        super().__init__(io.BytesIO(data))
        self._devices = tuple(devices)

    def persistent_load(self, pid: Any) -> Any:
        formats, client = _formats(), self._devices[0].client
        assert formats is not None, "it was looked up before"
        match pid:
            case ("executable", serialized):
                options = formats.compile_options(
                    num_replicas=1,
                    num_partitions=len(self._devices),
                    device_assignment=np.array([[device.id for device in self._devices]]),
                    backend=client,
                )
                return client.deserialize_executable(serialized, formats.device_list(self._devices), options)
            case ("device", rank):
                return self._devices[rank]
            case ("client",):
                return client
        raise pickle.UnpicklingError(f"unknown reference {pid[0]!r}")


@functools.cache
def _say_once(why: str) -> None:
    logger.warning(
        "programs are compiled for each group of devices, which takes longer: JAX %s gives none of them as bytes (%s)",
        jax.__version__,
        why,
    )
