"""Memory of the host process."""

import ctypes


def trim_host_memory() -> None:
    """Return freed heap memory of this process to the operating system. Works only with the C library glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
