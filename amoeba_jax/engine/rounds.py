"""One round over all instances after the other: what is due is launched."""

import math
import time
from collections.abc import Callable

from amoeba_jax.engine.launching import Launching
from amoeba_jax.instances.cluster import Cluster


class Rounds:
    """Launches the steps that are due, and lets calls that wait come between two launches. Used by the dispatcher
    thread only.

    Args:
        admit: starts what can start.

    Attributes:
        next_at: when the next step is due that was not in the last round (`time.perf_counter`); infinite: unknown.
        calls_wait: tells whether the thread is wanted for a call.
    """

    def __init__(self, cluster: Cluster, launching: Launching, admit: Callable[[], None]):
        self._cluster, self._launching, self._admit = cluster, launching, admit
        self.next_at = math.inf
        self.calls_wait: Callable[[], bool] = lambda: False
        self._last = -1
        """Id of the instance for which the last step was launched in a round that a call has ended; else below all."""

    def launch_due(self) -> bool:
        """Launch the steps that are due, until a call waits: at least one. The next round begins behind the instance
        that this one got to, as calls may come in every round. Returns whether anything was launched."""
        cluster, launched, seen = self._cluster, False, ()
        self.next_at = math.inf
        while seen != cluster.instances:  # a transformation may end here and leave others
            seen, self.next_at = cluster.instances, math.inf
            last, self._last = self._last, -1
            for instance in sorted(seen, key=lambda i: i.id <= last):
                due_s = 0.0
                while instance in cluster.instances and (due_s := self._launching.due_s(instance)) <= 0:
                    if launched and self.calls_wait():
                        self.next_at, self._last = time.perf_counter(), last
                        return True
                    if not self._launching.launch(instance):
                        break
                    launched, last = True, instance.id
                    self._admit()  # which may pause instances
                if due_s > 0:
                    self.next_at = min(self.next_at, time.perf_counter() + due_s)
        return launched
