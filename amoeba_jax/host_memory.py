"""Host memory of the process."""

import ctypes


def trim_host_memory() -> None:
    """Return freed memory of the process to the system, if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
