"""Sequences of an engine: the queue, the preemption of a sequence, and the end of a sequence."""

import logging

from amoeba_jax.errors import NotANumberError, RequestError, RequestFailedError
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.queue import Siblings, Waiting, mark_beyond_share
from amoeba_jax.instances.sequence import Sequence, Update
from amoeba_jax.outputs import FinishReason
from amoeba_jax.stats import EngineStats
from kvcache.prefix_cache import PageKeys

logger = logging.getLogger(__name__)


class Sequences:
    """All sequences of an engine. Used by the dispatcher thread only.

    A sequence is one sample of a request: the prompt of the request, and the output of this sample.

    Attributes:
        waiting: queue of waiting sequences. The first sequence in the queue starts first.
        siblings: registry of second and later samples of requests. The registry decides when these samples enter the
            queue.
        num_changes: number of events so far that may let a waiting sequence start. An example of such an event is the
            end of a sequence, which frees pages.
    """

    def __init__(self, cluster: Cluster, stats: EngineStats):
        self._cluster, self._stats = cluster, stats
        self.waiting = Waiting()
        self.siblings = Siblings()
        self.num_changes = 0
        self._shared_at = 0
        self._has_shares = False

    @property
    def running(self) -> list[Sequence]:
        """Running and paused sequences of all instances."""
        return [sequence for instance in self._cluster.all_instances for sequence in instance.running]

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence to the queue."""
        if sequence.page_keys is None:
            sequence.page_keys = PageKeys(self._cluster.dims.page_size, sequence.cache_salt or "")
        self.waiting.add(sequence)
        self.num_changes += 1

    def share_out(self) -> None:
        """Move the waiting sequences that exceed the share of their client to the end of the queue.

        All clients have equal shares of the slots and the KV cache (`mark_beyond_share`). If `num_changes` has not
        changed since the previous call, do nothing.
        """
        if self._shared_at == self.num_changes:
            return
        running = self.running
        clients = {*self.waiting.clients, *(sequence.client for sequence in running if not sequence.finished)}
        if len(clients) > 1 or self._has_shares:  # a single client has all slots: skip the search for excess sequences
            self._has_shares = len(clients) > 1
            slots = sum(instance.max_running for instance in self._cluster.instances)
            tokens = sum(instance.capacity_tokens for instance in self._cluster.instances)
            if mark_beyond_share(running, self.waiting, slots, tokens):
                self.num_changes += 1
        self._shared_at = self.num_changes

    def preempt(self, instance: Instance, sequence: Sequence) -> None:
        """Free the pages of a running or paused sequence, and put the sequence back into the queue.

        In the queue, the sequence comes before newer requests of equal priority. When the sequence starts again, its KV
        cache is computed again, except pages that are still in the prefix cache.

        If the sampling of the sequence's next token is already launched, the token is kept. With structured output, the
        sampling may still wait for an earlier token. In that case, `Runner.sample_late` drops the sampling, and the
        sequence samples the token when it runs again.
        """
        self._take_off(instance, sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        sequence.wait_again()
        self._stats.preemptions += 1
        self.release_siblings(sequence)
        self.enqueue(sequence)

    def release_siblings(self, leader: Sequence) -> None:
        """Let the siblings of a leader enter the queue: the second and later samples of the leader's request.

        Call this when the prompt of the leader is computed, or when the leader is preempted or ends. If the siblings of
        all requests would take too many slots, some siblings enter the queue later (`Siblings`).
        """
        self.siblings.release(leader)
        self._admit_siblings()

    def _admit_siblings(self) -> None:
        if self.siblings.held:
            for sibling in self.siblings.admit(sum(instance.max_running for instance in self._cluster.instances)):
                self.enqueue(sibling)

    def cache_pages(self, instance: Instance, sequence: Sequence) -> None:
        """Add the full pages of a sequence to the prefix cache.

        A page is left out if the host does not know all tokens of the page yet, or if no launched step computes the
        last token of the page.
        """
        cache = instance.lane_of(sequence).cache
        if sequence.needs_prompt_logits or not cache.enabled:
            return
        assert sequence.page_keys is not None, "the queue creates them"
        assert sequence.pages is not None, "it runs on this instance"
        sequence.page_keys.extend(sequence.tokens(sequence.page_keys.num_tokens, sequence.num_known))
        full = min(sequence.num_computed, sequence.num_known) // self._cluster.dims.page_size
        cache.insert(sequence.page_keys.keys[:full], sequence.pages)

    def _take_off(self, instance: Instance, sequence: Sequence) -> None:
        self.cache_pages(instance, sequence)
        instance.remove(sequence)
        self.num_changes += 1

    # The end of sequences

    def finish(self, sequences: list[Sequence], reason: FinishReason, stop_reason: str | None = None) -> None:
        """End sequences early and free their pages. Skip sequences that have already ended.

        `stop_reason` is the stop string that was found in the output. None: the sequences end for another reason.
        """
        for sequence in sequences:
            if not sequence.finished:
                sequence.finish(reason, stop_reason)
                self._end(sequence)

    def reject(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence, and pass an error to the client.

        If the sequence is a leader, also end the siblings that wait for its prompt. If `error` is a `RequestError`,
        `NotANumberError` or `RequestFailedError`, the client gets `error` itself. Otherwise, the client gets a
        `RequestFailedError`.
        """
        if not isinstance(error, RequestError | NotANumberError | RequestFailedError):
            logger.error("request %s cannot be served", sequence.request_id, exc_info=error)
            drop_frames(error)
            failure = RequestFailedError(f"request {sequence.request_id} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        siblings, sequence.siblings = sequence.siblings, []
        for each in (sequence, *siblings):
            if not each.finished:
                each.fail(error)
                self._end(each)

    def fail_all(self, error: BaseException) -> None:
        """End all sequences with `error`, because the engine ends."""
        sequences = [*self.waiting, *self.siblings.held, *self.running]
        sequences += [sibling for sequence in sequences for sibling in sequence.siblings]
        self.waiting.clear()
        self.siblings.clear()
        for instance in self._cluster.all_instances:
            for lane in instance.lanes:
                lane.running.clear()
            instance.pending.clear()
        for sequence in sequences:
            sequence.fail(error)
            self.report(Update(sequence, finished=True))

    def _end(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self.report(Update(sequence, finished=True))

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence from its instance or from the queue.

        If the sequence is a leader, let the siblings that wait for its prompt enter the queue (`release_siblings`).
        """
        if sequence.slot >= 0:
            self._take_off(self._cluster.instance_of(sequence), sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self.num_changes += 1
        self.siblings.remove(sequence)
        self.release_siblings(sequence)

    def report(self, update: Update) -> None:
        """Pass an update, such as new tokens of a sequence, to the callback `Sequence.sink`.

        If the callback raises an error, abort the sequence.
        """
        sequence = update.sequence
        try:
            sequence.sink(update)
        except Exception:
            logger.exception("the output of request %s cannot be delivered: it is aborted", sequence.request_id)
            if not sequence.finished:
                sequence.finish("abort")
                self.remove(sequence)
