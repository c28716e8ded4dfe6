"""How JAX is set up for serving."""

import os
import sys
import threading
from pathlib import Path

import pytest

from amoeba_jax.platform import COMPUTE_NICENESS, serving_devices


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_threads_that_compute_yield_to_all_others():
    serving_devices(1)
    serving_devices(1)  # the same once more changes nothing
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found = {task: (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    compute = [int(task.name) for task, name in found.items() if name == "tf_XLAEigen"]
    assert len(compute) > 1, "XLA's pool has another name in this release of JAX"
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in compute} == {own + COMPUTE_NICENESS}
    assert os.getpriority(os.PRIO_PROCESS, threading.main_thread().native_id or 0) == own
