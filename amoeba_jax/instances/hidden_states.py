"""The buffers of hidden states that the programs of a step hand on, one on each device of an instance."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sharding.mesh import SubMesh, assemble, disassemble, is_lost


class HiddenStates:
    """A buffer `[D, hidden_tokens]` of each rank, whose first columns are a step's tokens. Used by the dispatcher
    thread only.

    Programs take them donated: `take` gives them away, and `put` takes them back.
    """

    def __init__(self, group: SubMesh, buffers: Sequence[jax.Array]):
        self._group = group
        self._shape, self._dtype = buffers[0].shape, buffers[0].dtype
        self._buffers: list[jax.Array | None] = list(buffers)
        self._whole: jax.Array | None = None  # all of them as one array, in steady state

    def take(self, group: SubMesh, *, replicated: bool = True) -> jax.Array:
        """The buffers of some ranks as one array: `[D, hidden_tokens]`, or `[tp * D, hidden_tokens]` if not
        `replicated`."""
        if self._whole is not None:
            if replicated and group.tp == self._group.tp:
                whole, self._whole = self._whole, None
                return whole
            self._take_apart()
        ranks = self._ranks(group)
        buffers = [buffer for buffer in self._buffers[ranks] if buffer is not None]
        self._buffers[ranks] = [None] * group.tp
        return assemble(group, buffers, replicated=replicated)

    def put(self, group: SubMesh, array: jax.Array, *, replicated: bool = True) -> None:
        """Take back what `take` gave for the same ranks, or what a program returned for it."""
        if replicated and group.tp == self._group.tp:
            self._whole = array
        else:
            self._buffers[self._ranks(group)] = disassemble(group, array)

    def spread(self, source: SubMesh, target: SubMesh) -> None:
        """Copy what the ranks of one group have to those of another that are not among them."""
        if self._whole is not None:
            self._take_apart()
        origin = self._buffers[self._ranks(source)][0]
        for rank, device in enumerate(target.devices, target.start - self._group.start):
            if device not in source.devices:
                self._buffers[rank] = jax.device_put(origin, device)

    def release(self, *, check: bool = True) -> list[jax.Array]:
        """Give all buffers away, in the order of ranks: the next instance on these devices has them.

        To `check` whether any is lost, which waits for the steps that were launched, can be left to the next instance.
        """
        if check:
            self.replace_lost()
        self._take_apart()
        return [buffer for buffer in self._buffers if buffer is not None]

    def replace_lost(self) -> None:
        """Put zeros in the place of buffers that failed programs have taken along."""
        if self._whole is not None and not is_lost(self._whole):
            return
        if self._whole is not None:
            self._whole, self._buffers = None, [None] * self._group.tp
        for rank, device in enumerate(self._group.devices):
            buffer = self._buffers[rank]
            if buffer is None or is_lost(buffer):
                self._buffers[rank] = jnp.zeros(self._shape, self._dtype, device=device)

    @property
    def is_lost(self) -> bool:
        """Whether a failed program has taken any along."""
        if self._whole is not None:
            return is_lost(self._whole)
        return any(buffer is None or is_lost(buffer) for buffer in self._buffers)

    def _take_apart(self) -> None:
        if self._whole is not None:
            self._buffers[:] = disassemble(self._group, self._whole)
            self._whole = None

    def _ranks(self, group: SubMesh) -> slice:
        first = group.start - self._group.start
        return slice(first, first + group.tp)
