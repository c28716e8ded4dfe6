"""Instances, their requests, and the step that moves all of them forward."""

import bisect
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future

import jax
import numpy as np

from amoeba_jax.config import EngineConfig
from amoeba_jax.engine.batcher import plan_step
from amoeba_jax.engine.cluster import Cluster
from amoeba_jax.engine.instance import Instance, PendingStep, Row, StepPlan
from amoeba_jax.engine.loading import OpenWeights
from amoeba_jax.engine.placement import Placement
from amoeba_jax.engine.sampling import NO_TOKEN, logprob_entry, unpack_logprobs, unpack_result
from amoeba_jax.engine.sequence import Sequence, Update
from amoeba_jax.engine.transform_job import TransformOptions
from amoeba_jax.engine.transformation import Transformations
from amoeba_jax.errors import DeadlineError, MemoryBudgetError, NotANumberError, NotCompiledError, RequestError
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.outputs import FinishReason
from amoeba_jax.stats import STEP_TOKENS, EngineStats
from amoeba_jax.transform import TransformReport
from kvcache.pages import SequencePages
from kvcache.prefix_cache import PageKeys

# The step that computes, and one behind it so that the device need not wait for the host.
MAX_PENDING_STEPS = 2
# What a running sequence weighs, in prompt tokens to compute, when an instance is chosen for the next one.
_DECODE_COST = 16


class Engine:
    """Everything behind the API, driven by one thread: all methods run in the dispatcher thread.

    The loop is `advance` (launch steps), wait for a result, `collect` (take in what has arrived). Each instance has up
    to two steps launched: the device computes one while the host takes in the results of the one before it.

    Construction loads the weights. `on_load(name)` is called after each parameter.

    Attributes:
        on_result: called from other threads whenever `collect` has something to take; must not block.
        placement: decides where sequences go, and when instances change; None: the engine places them itself, and
            instances change only when told to.
        num_changes: grows with whatever may let a waiting sequence go on: one came, ended, or lost its pages.
    """

    def __init__(
        self,
        config: EngineConfig,
        dims: ModelDims,
        devices: tuple[jax.Device, ...],
        open_weights: OpenWeights,
        on_load: Callable[[str], None],
    ):
        self.config = config
        self.dims = dims
        self.cluster = Cluster(config, dims, devices, open_weights, on_load)
        self.cluster.on_result = lambda: self.on_result()
        self.max_model_len = self.cluster.max_model_len
        self.transformations = Transformations(self.cluster, self._drain, self._preempt, self._refuse)
        self.waiting: list[Sequence] = []
        self.stats = EngineStats()
        self.placement: Placement | None = None
        self.num_changes = 0
        self._numbers = itertools.count()
        self.on_result: Callable[[], None] = lambda: None

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The serving replicas."""
        return self.cluster.instances

    def transform(self, options: TransformOptions) -> "Future[TransformReport]":
        """Begin to change the degree of instances, while requests run. See `LLM.transform`.

        Raises `LayoutError` or `RequestError`, with nothing changed, where it cannot be done.
        """
        degree = options.tensor_parallel_size
        self.cluster.sub_meshes.check_degree(degree)
        if self.placement is None:
            self._check_waiting(options)
        return self.transformations.request(options)

    def _check_waiting(self, options: TransformOptions) -> None:
        """Raise `RequestError` if a waiting request would not fit any instance afterwards."""
        limit, degree = max(self.transformations.capacity_to_come(i, options) for i in self.instances)
        for sequence in self.waiting:
            if sequence.most_tokens > limit:
                raise RequestError(
                    f"the transformation is refused: request {sequence.request_id!r}, which waits, needs "
                    f"{sequence.most_tokens} tokens, and a TP{degree} instance would hold {limit}"
                )

    def end_transformations(self) -> None:
        """Go on, and wait, until no transformation is under way."""
        while self.transformations.busy:
            self.advance()
            self.drain()
            self.transformations.wait()

    def set_layout(self, tp: int) -> float:
        """Regroup all devices into instances of degree `tp`; returns the seconds it took.

        Raises `RequestError` while requests are waiting or running.
        """
        self.cluster.sub_meshes.check_degree(tp)
        self.check_idle("the layout cannot change")
        start = time.perf_counter()
        devices = tuple(range(len(self.cluster.sub_meshes.devices)))
        report = self.transform(TransformOptions(tp, devices))
        self.end_transformations()
        report.result()
        return time.perf_counter() - start

    def check_idle(self, what: str) -> None:
        """Raise `RequestError`, saying what cannot be, while requests are waiting or running."""
        self.drain()
        if self.has_requests or self.transformations.busy:
            running = sum(len(instance.running) for instance in self.instances)
            raise RequestError(
                f"{what} with {running} running and {len(self.waiting)} waiting requests: "
                "wait for them to finish, or use transform()"
            )

    def capacity_tokens(self, tp: int) -> int:
        """Tokens that an empty instance of degree `tp` holds, with the weights released that its ranks do not need."""
        return self.cluster.capacity_tokens(tp, tp)

    @property
    def has_requests(self) -> bool:
        """Requests are waiting or running. (Siblings wait for one that is.)"""
        return bool(self.waiting) or any(instance.running for instance in self.instances)

    # Requests

    def check_request(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise `RequestError` for a request that no instance can hold when the transformations under way are through,
        or, with a `placement` that may change the layout, none of any layout. May be called by any thread."""
        total = num_prompt_tokens + max_tokens
        if not (instances := self.instances):
            return  # closed: whatever is asked next says so
        capacity, tp = max(map(self.transformations.capacity_to_come, instances))
        if self.placement is not None:
            degrees = self.cluster.sub_meshes.degrees()
            capacity, tp = max((capacity, tp), *((self.capacity_tokens(degree), degree) for degree in degrees))
        limit = min(self.max_model_len, capacity)
        if total > limit:
            raise RequestError(
                f"prompt of {num_prompt_tokens} tokens plus max_tokens={max_tokens} is {total} tokens, over the "
                f"limit of {limit}: the model's context is {self.max_model_len} and the KV cache of a "
                f"TP{tp} instance holds {capacity}"
            )

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue requests, all or none: raises `RequestError` as `check_request` does.

        Those that were cancelled before they came here have ended already, and are left as they are.
        """
        sequences = [sequence for sequence in sequences if not sequence.finished]
        for sequence in sequences:
            self.check_request(len(sequence.prompt), sequence.params.max_tokens)
        for sequence in sequences:
            number = next(self._numbers)
            for s in (sequence, *sequence.siblings):
                s.number = number
            self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.page_keys is None:
            sequence.page_keys = PageKeys(self.dims.page_size, sequence.cache_salt or "")
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)
        self.num_changes += 1

    def finish(self, sequences: list[Sequence], reason: FinishReason, stop_reason: str | None = None) -> None:
        """End sequences early; their pages are free afterwards. Those that have ended already are left as they are."""
        for sequence in sequences:
            if sequence.finished:
                continue
            sequence.finish(reason, stop_reason)
            self._take_out(sequence)
            sequence.sink(Update(sequence, finished=True))

    def _take_out(self, sequence: Sequence) -> None:
        """Remove a finished sequence from wherever it is, and let its siblings go on without it."""
        if sequence.slot >= 0:
            self._retire(self._home(sequence), sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self.num_changes += 1
        self._release_siblings(sequence)

    def _release_siblings(self, leader: Sequence) -> None:
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            if not sibling.finished:
                self._enqueue(sibling)

    def _home(self, sequence: Sequence) -> Instance:
        return next(instance for instance in self.instances if sequence in instance.running)

    # Steps

    def advance(self) -> bool:
        """Admit what fits and launch steps, as far ahead as results may lag. Returns whether anything was launched.

        Raises `RuntimeError` if there is work and nothing can ever move it.
        """
        self._admit()
        launched, seen = False, ()
        while seen != self.instances:  # a transformation may end here and leave others
            seen = self.instances
            for instance in seen:
                while len(instance.pending) < MAX_PENDING_STEPS and self._launch(instance):
                    launched = True
                    self._admit()
        pending = any(instance.pending for instance in self.instances)
        if self.placement is not None:
            return launched  # what waits may wait for its decision
        if not launched and not pending and not self.transformations.busy and self.has_requests:
            raise RuntimeError(f"{len(self.waiting)} waiting requests cannot be served and nothing is running")
        return launched

    def collect(self) -> None:
        """Take in the results that have arrived, in the order of their steps."""
        for instance in self.instances:
            while instance.pending and instance.pending[0].done:
                self._take(instance, instance.pending.popleft())
        self.transformations.collect()

    def drain(self) -> None:
        """Wait for all launched steps and take in their results."""
        for instance in self.instances:
            self._drain(instance)
        self.transformations.collect()

    def _drain(self, instance: Instance) -> None:
        while instance.pending:
            self._take(instance, instance.pending.popleft())

    def _admit(self) -> None:
        """Place waiting sequences, in order: nobody overtakes within a priority, so nobody starves."""
        if self.placement is not None:
            self.placement.place(self)
            return
        while self.waiting:
            sequence = self.waiting[0]
            if sequence.deadline is not None and sequence.deadline < time.monotonic():
                self.reject(sequence, DeadlineError("the request's time is over, and no instance has had room for it"))
                continue
            if sequence.num_in_flight:
                return  # preempted a moment ago: its last token is not known yet
            instance = self._choose_instance(sequence)
            if instance is not None:
                self.waiting.pop(0)
                self._place(instance, sequence)
            elif self._fits_nowhere(sequence):
                capacity = max(instance.capacity_tokens for instance in self.instances)
                message = f"it needs {sequence.most_tokens} tokens, and no instance holds more than {capacity} any more"
                self.reject(sequence, RequestError(message))
            elif not self._preempt_lower_priority(sequence):
                return

    def _fits_nowhere(self, sequence: Sequence) -> bool:
        """It came before instances became smaller, or before those failed that should have become larger."""
        return not self.transformations.busy and all(i.capacity_tokens < sequence.most_tokens for i in self.instances)

    # For a placement

    def start(self, instance: Instance, sequence: Sequence) -> None:
        """Let a waiting sequence run. Raises `RequestError`, with nothing changed, if it cannot run there now."""
        most = sequence.most_tokens
        if sequence not in self.waiting or sequence.num_in_flight:
            raise RequestError(f"request {sequence.request_id!r} does not wait")
        if instance.transition is not None:
            raise RequestError(f"instance {instance.id} is being transformed")
        if instance.capacity_tokens < most:
            raise RequestError(f"instance {instance.id} holds {instance.capacity_tokens} tokens, and it needs {most}")
        if not instance.has_free_slot or (
            self.leader_home(sequence) is not instance
            and not instance.cache.fits(self._reusable_keys(sequence), sequence.num_known)
        ):
            raise RequestError(f"instance {instance.id} has no room for {sequence.num_known} tokens now")
        self.waiting.remove(sequence)
        self._place(instance, sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence off its instance; it waits, and is computed again from its tokens.

        Raises `RequestError`, with nothing changed, if it does not run, or where its instance is being transformed.
        """
        if sequence.slot < 0:
            raise RequestError(f"request {sequence.request_id!r} does not run")
        home = self._home(sequence)
        if home.transition is not None:
            raise RequestError(f"instance {home.id} is being transformed")
        self._preempt(home, sequence)

    def reject(self, sequence: Sequence, error: RequestError) -> None:
        """End a waiting sequence with an error for its client, and the others of its request with it."""
        siblings, sequence.siblings = sequence.siblings, []
        for s in (sequence, *siblings):
            s.error, s.finished_at = error, time.monotonic()
            self._take_out(s)
            s.sink(Update(s, finished=True))

    def _choose_instance(self, sequence: Sequence) -> Instance | None:
        """The instance that can take a sequence and has the least to compute before and beside it, if any."""
        if (home := self.leader_home(sequence)) is not None:
            return home
        keys = self._reusable_keys(sequence)
        candidates = []
        for instance in self.instances:
            # A page more for everyone who runs: so that it isn't preempted for their next token.
            page_size = self.dims.page_size
            total = min(sequence.num_known + page_size, sequence.most_tokens)
            total += page_size * len(instance.running)
            holds = instance.capacity_tokens >= sequence.most_tokens
            admits = instance.transition is None and instance.has_free_slot and holds
            if admits and instance.cache.fits(keys, total):
                new = sequence.num_known - instance.cache.num_cached(keys) * self.dims.page_size
                backlog = sum(s.num_left for s in instance.running)
                candidates.append((new + backlog + _DECODE_COST * len(instance.running), instance.id, instance))
        return min(candidates)[2] if candidates else None

    def leader_home(self, sequence: Sequence) -> Instance | None:
        """Where a sibling can share the pages of its leader's prompt: one page more, a copy of the last, is enough."""
        leader = sequence.leader
        if leader is None or sequence.num_generated or leader.slot < 0 or leader.num_computed < len(leader.prompt):
            return None
        home = self._home(leader)
        if home.transition is not None:
            return None
        return home if home.has_free_slot and home.cache.num_available_pages > 0 else None

    def _reusable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the pages that a sequence may take from the cache: all but the last token, which is computed."""
        if sequence.needs_prompt_logits:
            return []
        assert sequence.page_keys is not None
        sequence.page_keys.extend(sequence.tokens(sequence.page_keys.num_tokens, sequence.num_known))
        return sequence.page_keys.keys[: (sequence.num_known - 1) // self.dims.page_size]

    def _place(self, instance: Instance, sequence: Sequence) -> None:
        """Give a sequence its pages and a slot."""
        if self.leader_home(sequence) is instance:
            self._fork(instance, sequence)
        else:
            sequence.pages = instance.cache.match(self._reusable_keys(sequence))
            sequence.num_computed = sequence.pages.num_pages * self.dims.page_size
            instance.cache.reserve(sequence.pages, sequence.num_known)
        if sequence.started_at is None:
            sequence.started_at = time.monotonic()
            sequence.num_cached = sequence.num_computed
            self.stats.cached_tokens += sequence.num_computed
        instance.add(sequence)

    def _fork(self, instance: Instance, sequence: Sequence) -> None:
        """Share the pages of the leader's prompt. The last token is computed again, in a copy of its page."""
        leader = sequence.leader
        assert leader is not None, "only a sibling forks"
        assert leader.pages is not None, "it runs here"
        last = len(sequence.prompt) - 1
        table = leader.pages.table[:, : self.dims.pages.pages_for(len(sequence.prompt))]
        instance.pages.share(table)
        sequence.pages = SequencePages(instance.pages, table)
        sequence.num_computed = last
        copied = instance.cache.make_private(sequence.pages, last // self.dims.page_size)
        assert copied is not None, "the leader has it too"
        instance.copy_page(*copied)

    def _preempt_lower_priority(self, sequence: Sequence) -> bool:
        """Preempt the last in order of all running sequences, if it has a lower priority than this one."""
        instances = [instance for instance in self.instances if instance.transition is None]
        running = [(s.order, instance) for instance in instances for s in instance.running if not s.finished]
        if not running:
            return False
        order, instance = max(running, key=lambda item: item[0])
        if order[0] <= sequence.params.priority:
            return False
        self._preempt(instance, max(instance.running, key=lambda s: s.order))
        return True

    def _preempt(self, instance: Instance, sequence: Sequence) -> None:
        """Take a sequence's pages; it waits, first of its priority, and is computed again from its tokens.

        A token of it that is in flight arrives all the same.
        """
        self._retire(instance, sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        if len(sequence.prompt_logprobs) < len(sequence.prompt):
            del sequence.prompt_logprobs[1:]
        self.stats.preemptions += 1
        self._release_siblings(sequence)
        self._enqueue(sequence)

    def _retire(self, instance: Instance, sequence: Sequence) -> None:
        """Take a sequence off its instance. What it computed stays in the cache while there is room."""
        self._cache_pages(instance, sequence)
        instance.remove(sequence)
        self.num_changes += 1

    def _cache_pages(self, instance: Instance, sequence: Sequence) -> None:
        """Let others find the full pages whose tokens are known and computed, or about to be by a launched step."""
        if sequence.needs_prompt_logits or not instance.cache.enabled:
            return
        assert sequence.page_keys is not None, "made when it was queued"
        assert sequence.pages is not None, "it runs here"
        sequence.page_keys.extend(sequence.tokens(sequence.page_keys.num_tokens, sequence.num_known))
        full = min(sequence.num_computed, sequence.num_known) // self.dims.page_size
        instance.cache.insert(sequence.page_keys.keys[:full], sequence.pages)

    def _launch(self, instance: Instance) -> bool:
        """Launch an instance's next step, if it has anything to compute."""
        if instance.transition is not None:
            plan = self.transformations.advance(instance, self._reserve_next_tokens)
            if plan is not None:
                self._count(plan)
                self._end_prompts(plan)
            return True
        self._reserve_next_tokens(instance)
        plan = plan_step(instance.running, instance.buckets, instance.num_launched % 2 == 0)
        if plan is None:
            return False
        try:
            instance.launch_plan(plan)
        except (NotCompiledError, MemoryBudgetError) as error:
            self._refuse(instance, plan, error)
            return self._launch(instance)
        self._count(plan)
        for sequence in self._end_prompts(plan):
            self._cache_pages(instance, sequence)
        return True

    def _end_prompts(self, plan: StepPlan) -> list[Sequence]:
        """The sequences whose prompt is through with a step that was launched: their siblings may begin."""
        ended = [r.sequence for r in plan.rows if r.start < len(r.sequence.prompt) <= r.start + r.length]
        for sequence in ended:
            self._release_siblings(sequence)
        return ended

    def _refuse(self, instance: Instance, plan: StepPlan, error: Exception) -> None:
        """End the sequence of a step that its missing program is for, so that the others can go on without it.

        That is one with bad words, which alone need programs that depend on the request, or else the last in order.
        """
        sequence = max((row.sequence for row in plan.rows), key=lambda s: (len(s.sampling.bad_words), s.order))
        sequence.error = error if isinstance(error, RequestError) else RequestError(str(error))
        sequence.finished_at = time.monotonic()
        self._take_out(sequence)
        sequence.sink(Update(sequence, finished=True))

    def _count(self, plan: StepPlan) -> None:
        """Add a step that was launched to the totals."""
        stats, tokens = self.stats, 0
        for row in plan.rows:
            tokens += row.length
            if row.start < len(row.sequence.prompt) or row.length > 1:
                stats.prompt_tokens += row.length
            else:
                stats.decode_tokens += 1
        stats.steps += 1
        stats.steps_by_tokens[bisect.bisect_left(STEP_TOKENS, tokens)] += 1

    def _reserve_next_tokens(self, instance: Instance) -> int:
        """Give every sequence that decodes a page for its next token, the last in order going without if need be.

        Returns the number of those, which are preempted.
        """
        num_preempted = 0
        for sequence in sorted((s for s in instance.running if s.num_left > 0), key=lambda s: s.order):
            while sequence.slot >= 0 and (holders := instance.reserve(sequence, sequence.num_tokens)):
                self._preempt(instance, max(holders, key=lambda s: s.order))
                num_preempted += 1
        return num_preempted

    def _take(self, instance: Instance, step: PendingStep) -> None:
        """Hand out the tokens of a step, and end the sequences that are done."""
        if step.prompt_result is not None and step.prompt_row is not None:
            self._take_prompt_logprobs(instance, step.prompt_row, step.prompt_result.result())
        result = unpack_result(step.result.result())
        instance.pace.take(step.launched_at, time.perf_counter(), step.decodes)
        for row in step.sampled:
            sequence = row.sequence
            if sequence.finished:
                continue  # ended while this step was on its way
            token = int(result.tokens[row.place])
            if token == NO_TOKEN:
                self._end_without_token(instance, sequence)
                continue
            entry = None
            if sequence.params.logprobs is not None:
                assert result.logprobs is not None, "the step was sampled with them"
                entry = logprob_entry(result.logprobs, row.place, token, sequence.params.logprobs)
            sequence.append(token)
            if sequence.slot < 0:
                self.num_changes += 1  # preempted: its last token is known now, and it can start again
            if sequence.finished:
                self._take_out(sequence)
            sequence.sink(Update(sequence, (token,), entry, sequence.finished))

    def _end_without_token(self, instance: Instance, sequence: Sequence) -> None:
        """End a sequence whose logits are not numbers. Nobody is to find its pages, which may have them too.

        As they are, pages may go to others: attention leaves out what a query does not see, and whoever gets a page
        writes what it sees of it first.
        """
        sequence.error = NotANumberError(
            f"the model's logits for request {sequence.request_id!r} after {sequence.num_known} tokens are infinite or "
            "not numbers: its weights may be damaged, or values overflow, which they do less in float32 or bfloat16"
        )
        sequence.finished_at = time.monotonic()
        self.stats.nan_logits += 1
        self._take_out(sequence)
        if sequence.page_keys is not None:
            instance.cache.forget(sequence.page_keys.keys)
        sequence.sink(Update(sequence, finished=True))

    def _take_prompt_logprobs(self, instance: Instance, row: Row, packed: np.ndarray) -> None:
        sequence = row.sequence
        missing = len(sequence.prompt_logprobs)
        if sequence.finished or missing != row.start + 1:
            return  # of a run that was preempted: they are computed again
        logprobs = unpack_logprobs(packed[row.place :])  # rows before it are padding, of one token each
        targets = sequence.prompt[row.start + 1 : row.start + row.length + 1]
        if np.isnan(logprobs.logprob[: len(targets)]).any():
            self._end_without_token(instance, sequence)
            return
        for index, token in enumerate(targets):
            entry = logprob_entry(logprobs, index, token, sequence.params.prompt_logprobs or 0)
            sequence.prompt_logprobs.append(entry)

    def fail(self, error: BaseException) -> None:
        """End every request with an error: a step failed, and the donated cache with it."""
        self.transformations.fail(error)
        sequences = [*self.waiting, *(s for instance in self.instances for s in instance.running)]
        sequences += [sibling for sequence in sequences for sibling in sequence.siblings]
        self.waiting.clear()
        for instance in self.instances:
            instance.running.clear()
            instance.pending.clear()
        for sequence in sequences:
            sequence.error = error
            sequence.finished_at = time.monotonic()
            sequence.sink(Update(sequence, finished=True))

    def close(self) -> None:
        """Drop every device buffer."""
        self.cluster.close()
