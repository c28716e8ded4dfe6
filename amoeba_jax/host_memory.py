"""Memory of the host that the process has freed, and the C library keeps."""

import ctypes


def trim_host_memory() -> None:
    """Give freed memory of the process back to the system, where its C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
