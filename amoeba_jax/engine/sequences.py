"""The sequences that wait, and how sequences end: whatever the reason, and wherever they are."""

import logging

from amoeba_jax.errors import NotANumberError, RequestError, RequestFailedError
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.queue import Deadlines, Siblings, Waiting, mark_beyond_share
from amoeba_jax.instances.room import Room
from amoeba_jax.instances.sequence import Sequence, Update
from amoeba_jax.outputs import FinishReason
from amoeba_jax.stats import EngineStats
from kvcache.prefix_cache import PageKeys

logger = logging.getLogger(__name__)


class Sequences:
    """The queue, and the end of every sequence. Used by the dispatcher thread only.

    Attributes:
        waiting: in the order in which they are served.
        deadlines: of those that wait.
        siblings: those of requests with `n > 1`.
        num_changes: grows with whatever may let a waiting sequence go on: one came, ended, or lost its pages.
    """

    def __init__(self, cluster: Cluster, room: Room, stats: EngineStats):
        self._cluster, self._room, self._stats = cluster, room, stats
        self.waiting = Waiting()
        self.deadlines = Deadlines()
        self._has_shares = False
        self.siblings = Siblings(self.enqueue, lambda: sum(i.max_running for i in cluster.instances))
        self.num_changes = 0

    @property
    def running(self) -> list[Sequence]:
        """Those of all instances, those that are paused as well."""
        return [sequence for instance in self._cluster.all_instances for sequence in instance.running]

    def enqueue(self, sequence: Sequence) -> None:
        """Have a sequence wait."""
        if sequence.page_keys is None:
            sequence.page_keys = PageKeys(self._cluster.dims.page_size, sequence.cache_salt or "")
        self.waiting.add(sequence)
        self.deadlines.add(sequence)
        self.num_changes += 1

    def dequeue(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue."""
        self.waiting.remove(sequence)

    def share_out(self) -> None:
        """Put the waiting sequences in order, by their clients' shares."""
        running = self.running
        clients = {*self.waiting.clients, *(sequence.client for sequence in running if not sequence.finished)}
        if len(clients) < 2 and not self._has_shares:
            return  # one client's requests need not be gone through
        self._has_shares = len(clients) > 1
        slots = sum(instance.max_running for instance in self._cluster.instances)
        tokens = sum(instance.capacity_tokens for instance in self._cluster.instances)
        if mark_beyond_share(running, self.waiting, slots, tokens):
            self.num_changes += 1

    def home(self, sequence: Sequence) -> Instance:
        """The instance that has a sequence, running or paused."""
        return self._room.home(sequence)

    # The end

    def finish(self, sequences: list[Sequence], reason: FinishReason, stop_reason: str | None = None) -> None:
        """End sequences early; their pages are free afterwards. Those that have ended already are left as they are."""
        for sequence in sequences:
            if not sequence.finished:
                sequence.finish(reason, stop_reason)
                self._end(sequence)

    def reject(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence with an error for its client, and those of its request that wait for it. `RequestError` is the
        client's own fault; what is not known here becomes a `RequestFailedError`."""
        if not isinstance(error, RequestError | NotANumberError | RequestFailedError):
            logger.error("request %s cannot be served", sequence.request_id, exc_info=error)
            drop_frames(error)
            failure = RequestFailedError(f"request {sequence.request_id} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        siblings, sequence.siblings = sequence.siblings, []
        for s in (sequence, *siblings):
            if not s.finished:
                s.fail(error)
                self._end(s)

    def fail_all(self, error: BaseException) -> None:
        """End every sequence with an error: the engine ends."""
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

    def report(self, update: Update) -> None:
        """Hand out news of a sequence. Where no one can take it, the sequence ends: its results could go nowhere."""
        sequence = update.sequence
        try:
            sequence.sink(update)
        except Exception:
            logger.exception("news of request %s cannot be handed out: it ends", sequence.request_id)
            if not sequence.finished:
                sequence.finish("abort")
                self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence from wherever it is, and let its siblings go on without it."""
        if sequence.slot >= 0:
            self._take_off(self._room.home(sequence), sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self.num_changes += 1
        self.siblings.remove(sequence)
        self.siblings.release(sequence)

    def preempt(self, instance: Instance, sequence: Sequence) -> None:
        """Take a sequence's pages; it waits, first of its priority, and is computed again from its tokens.

        A token of it that is in flight arrives all the same.
        """
        self._take_off(instance, sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        sequence.wait_again()
        self._stats.preemptions += 1
        self.siblings.release(sequence)
        self.enqueue(sequence)

    def _take_off(self, instance: Instance, sequence: Sequence) -> None:
        """Take a sequence off its instance. What it computed stays in the cache while there is room."""
        self.cache_pages(instance, sequence)
        instance.remove(sequence)
        self.num_changes += 1

    def cache_pages(self, instance: Instance, sequence: Sequence) -> None:
        """Let others find the full pages whose tokens are known and computed, or about to be by a launched step."""
        cache = instance.lane_of(sequence).cache
        if sequence.needs_prompt_logits or not cache.enabled:
            return
        assert sequence.page_keys is not None, "made when it was queued"
        assert sequence.pages is not None, "it runs here"
        sequence.page_keys.extend(sequence.tokens(sequence.page_keys.num_tokens, sequence.num_known))
        full = min(sequence.num_computed, sequence.num_known) // self._cluster.dims.page_size
        cache.insert(sequence.page_keys.keys[:full], sequence.pages)
