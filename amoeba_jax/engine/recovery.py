"""What becomes of an instance whose programs failed on the device: its requests are computed again from their tokens.

Programs take the cache over (it is donated) and return it. One that fails, for lack of memory say, has lost the extents
that it had taken, and so have the steps behind it. Weights are never donated by steps.
"""

import gc
import logging
from collections.abc import Callable, Iterable

from amoeba_jax.errors import RequestFailedError
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step import Row, clear_in_flight
from amoeba_jax.instances.step_sampler import StateLostError
from amoeba_jax.stats import EngineStats
from sharding.mesh import is_lost

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Steps of one request that may fail before it ends with an error: it could be the reason."""
MAX_IN_A_ROW = 16
"""Failures of any instances, with no step in between that succeeds, from which on the engine gives up."""


class Recovery:
    """Puts instances in the place of those that lost their cache. Used by the dispatcher thread only.

    Args:
        requeue: takes a sequence off its instance, to be computed again.
        reject: ends a sequence with an error.
    """

    def __init__(
        self,
        cluster: Cluster,
        requeue: Callable[[Instance, Sequence], None],
        reject: Callable[[Sequence, Exception], None],
        stats: EngineStats,
    ):
        self._cluster, self._requeue, self._reject, self._stats = cluster, requeue, reject, stats
        self._in_a_row = 0

    def succeeded(self, rows: Iterable[Row]) -> None:
        """Results of a step have arrived."""
        self._in_a_row = 0
        for row in rows:
            row.sequence.num_failures = 0

    @staticmethod
    def is_due(instance: Instance, error: Exception) -> bool:
        """Whether what failed beside an instance's steps has taken some of its buffers along."""
        if isinstance(error, StateLostError):
            return True
        runner, state = instance.runner, instance.sampler.state
        buffers = [extent for site in runner.sites.values() for extent in site.extents()]
        buffers += [state.flags, state.bias, runner.last_tokens]
        return runner.hidden.is_lost or any(is_lost(buffer) for buffer in buffers)

    def recover(
        self, instance: Instance, error: Exception, rows: Iterable[Row] = (), sampled: Iterable[Row] = ()
    ) -> None:
        """Give an instance an empty cache, and have its sequences computed again.

        Args:
            error: what a step, or another program, failed with.
            rows: of that step. A sequence that was part of `MAX_FAILURES` such steps ends.
            sampled: of these, rows whose token was in flight.

        Raises `error` after `MAX_IN_A_ROW` failures without a success: the device itself does not work.
        """
        self._in_a_row += 1
        self._stats.failed_steps += 1
        if self._in_a_row > MAX_IN_A_ROW:
            raise error
        logger.error("a step of instance %d failed; its requests are computed again", instance.id, exc_info=error)
        drop_frames(error)
        involved = list(dict.fromkeys(row.sequence for row in rows))
        clear_in_flight(sampled)
        instance.requeue_all(self._requeue)
        self._replace(instance)
        for sequence in involved:
            if sequence.finished:
                continue
            sequence.num_failures += 1
            if sequence.num_failures >= MAX_FAILURES:
                failure = RequestFailedError(
                    f"request {sequence.request_id}: {sequence.num_failures} of its steps failed in a row: {error}"
                )
                failure.__cause__ = error
                self._reject(sequence, failure)

    def _replace(self, instance: Instance) -> None:
        try:
            self._cluster.rebuild(instance)
            return
        except Exception:
            logger.exception("the cache of instance %d cannot be made again", instance.id)
        gc.collect()  # what the error's frames held may be what there is no memory for
        try:
            self._cluster.rebuild(instance)
        except Exception:
            instance.site.kv.clear()
            self._cluster.take_back([instance])
