"""Instances, their requests, and the step that moves all of them forward."""

import bisect
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import jax

from amoeba_jax.config import EngineConfig
from amoeba_jax.engine.readiness import Readiness
from amoeba_jax.engine.recovery import Recovery
from amoeba_jax.engine.results import Results
from amoeba_jax.engine.scheduler_hook import SchedulerHook
from amoeba_jax.errors import DeadlineError, MemoryBudgetError, NotANumberError, RequestError, RequestFailedError
from amoeba_jax.instances.batcher import other_plans, plan_step, roomy_shapes
from amoeba_jax.instances.cluster import REVIVE_INTERVAL_S, Cluster, drop_frames
from amoeba_jax.instances.deadlines import Deadlines
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.room import Room
from amoeba_jax.instances.sequence import Sequence, Update
from amoeba_jax.instances.shares import mark_beyond_share
from amoeba_jax.instances.siblings import Siblings
from amoeba_jax.instances.step_plan import Row, StepNotLaunchedError, StepPlan
from amoeba_jax.instances.waiting import Waiting
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.outputs import FinishReason
from amoeba_jax.programs.catalogue import catalogue_by_degree
from amoeba_jax.sampling.rows import SamplerKind
from amoeba_jax.stats import STEP_TOKENS, EngineStats
from amoeba_jax.transform.job import TransformOptions
from amoeba_jax.transform.report import TransformReport
from amoeba_jax.transform.transformation import Transformations
from amoeba_jax.weights.loading import OpenWeights
from kvcache.pages import SequencePages
from kvcache.prefix_cache import PageKeys

# The step that computes, and one behind it so that the device need not wait for the host.
MAX_PENDING_STEPS = 2
logger = logging.getLogger(__name__)


class Engine:
    """Everything behind the API, driven by one thread: all methods run in the dispatcher thread.

    The loop is `advance` (launch steps), wait for a result, `collect` (take in what has arrived). Each instance has up
    to two steps launched: the device computes one while the host takes in the results of the one before it.

    Construction loads the weights. `on_load(name)` is called after each parameter.

    Attributes:
        on_result: called from other threads whenever `collect` has something to take; must not block.
        scheduler_hook: decides where sequences go, and when instances change; None: the engine places them itself, and
            instances change only when told to.
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
        self.cluster.on_result = self.cluster.executables.background.on_arrival = lambda: self.on_result()
        self.max_model_len = self.cluster.max_model_len
        self.stats = EngineStats()
        self.room = Room(self.cluster)
        self.recovery = Recovery(self.cluster, self._preempt, self.reject, self.stats)
        self.transformations = Transformations(self.cluster, self._drain, self._preempt, self._refuse)
        self.results = Results(self.reject, self._remove, self._report, self._failed, self.recovery, self.stats)
        self.waiting = Waiting()
        self.deadlines = Deadlines()
        self.siblings = Siblings(self._enqueue, lambda: sum(instance.max_running for instance in self.instances))
        self.scheduler_hook: SchedulerHook | None = None
        self.readiness = Readiness()
        self._num_changes = 0
        self._shared_at = 0
        self._has_shares = False
        self._numbers = itertools.count()
        self.on_result: Callable[[], None] = lambda: None

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The serving replicas."""
        return self.cluster.instances

    def transform(self, options: TransformOptions, wait_for_programs: bool = True) -> "Future[TransformReport]":
        """Begin to change the degree of instances, while requests run. See `LLM.transform`.

        Raises `LayoutError` or `RequestError`, with nothing changed, where it cannot be done.
        """
        degree = options.tensor_parallel_size
        self.cluster.sub_meshes.check_degree(degree)
        if not wait_for_programs:
            self.readiness.check(degree)
        if self.scheduler_hook is None:
            self._check_waiting(options)
        return self.transformations.request(options)

    def _check_waiting(self, options: TransformOptions) -> None:
        """Raise `RequestError` if a waiting request would not fit any instance afterwards."""
        limit, degree = max(self.transformations.capacity_to_come(i, options) for i in self.instances)
        for sequence in self.waiting:
            if sequence.max_total_tokens > limit:
                raise RequestError(
                    f"the transformation is refused: request {sequence.request_id!r}, which waits, needs "
                    f"{sequence.max_total_tokens} tokens, and a TP{degree} instance would hold {limit}"
                )

    def end_transformations(self) -> None:
        """Go on, and wait, until no transformation is under way."""
        while self.transformations.busy:
            self.advance()
            self.drain()
            self.transformations.wait()
            if self.transformations.awaits_programs:
                self.cluster.executables.background.wait()

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
    def num_changes(self) -> int:
        """Grows with whatever may let a waiting sequence go on: one came, ended, lost its pages, or got its last token
        after it had lost them."""
        return self._num_changes + self.results.num_arrived

    @property
    def interval_s(self) -> float | None:
        """Seconds after which `advance` is to be called though nothing has happened; None: no such time."""
        if self.cluster.lost:
            return REVIVE_INTERVAL_S
        return None if self.scheduler_hook is None else self.scheduler_hook.interval_s

    @property
    def has_requests(self) -> bool:
        """Requests are waiting or running. (Siblings wait for one that is, or are held for want of slots.)"""
        return len(self.waiting) > 0 or bool(self.siblings.held) or any(instance.running for instance in self.instances)

    # Requests

    def check_request(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise `RequestError` for a request that no instance can hold when the transformations under way are through,
        or, with a `scheduler_hook` that may change the layout, none of any layout. May be called by any thread."""
        total = num_prompt_tokens + max_tokens
        if not (instances := self.instances):
            return  # closed: whatever is asked next says so
        capacity, tp = max(map(self.transformations.capacity_to_come, instances))
        if self.scheduler_hook is not None:
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
        """Queue requests. One that `check_request` refuses ends with that error: instances may have become smaller
        since it was made.

        Those that were cancelled before they came here have ended already, and are left as they are.
        """
        for sequence in [sequence for sequence in sequences if not sequence.finished]:
            number = next(self._numbers)
            for s in (sequence, *sequence.siblings):
                s.number = number
            try:
                self.check_request(len(sequence.prompt), sequence.params.max_tokens)
                self._enqueue(sequence)
            except Exception as error:
                self.reject(sequence, error)

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.page_keys is None:
            sequence.page_keys = PageKeys(self.dims.page_size, sequence.cache_salt or "")
        self.waiting.add(sequence)
        if self.scheduler_hook is None:
            self.deadlines.add(sequence)
        self._num_changes += 1

    def finish(self, sequences: list[Sequence], reason: FinishReason, stop_reason: str | None = None) -> None:
        """End sequences early; their pages are free afterwards. Those that have ended already are left as they are."""
        for sequence in sequences:
            if sequence.finished:
                continue
            sequence.finish(reason, stop_reason)
            self._remove(sequence)
            self._report(Update(sequence, finished=True))

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
                self._remove(s)
                self._report(Update(s, finished=True))

    def _report(self, update: Update) -> None:
        """Hand out news of a sequence. Where no one can take it, the sequence ends: its results could go nowhere."""
        sequence = update.sequence
        try:
            sequence.sink(update)
        except Exception:
            logger.exception("news of request %s cannot be handed out: it ends", sequence.request_id)
            if not sequence.finished:
                sequence.finish("abort")
                self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence from wherever it is, and let its siblings go on without it."""
        if sequence.slot >= 0:
            self._retire(self.room.home(sequence), sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self._num_changes += 1
        self.siblings.remove(sequence)
        self.siblings.release(sequence)

    # Steps

    def advance(self) -> bool:
        """Admit what fits and launch steps, as far ahead as results may lag. Returns whether anything was launched.

        Raises `RuntimeError` if there is work and nothing can ever move it.
        """
        if self._take_programs() or self.cluster.revive():
            self._num_changes += 1
        self._admit()
        launched, seen = False, ()
        while seen != self.instances:  # a transformation may end here and leave others
            seen = self.instances
            for instance in seen:
                while len(instance.pending) < MAX_PENDING_STEPS and self._launch(instance):
                    launched = True
                    self._admit()
        pending = any(instance.pending for instance in self.instances)
        if self.scheduler_hook is not None or self.cluster.lost:
            return launched  # what waits may wait for its decision, or for devices that are out of service
        compiling = self.cluster.executables.background.num_left
        if not launched and not pending and not compiling and not self.transformations.busy and self.has_requests:
            raise RuntimeError(f"{len(self.waiting)} waiting requests cannot be served and nothing is running")
        return launched

    def _take_programs(self) -> bool:
        """Take in programs that were compiled in the background. Return whether there were any."""
        executables = self.cluster.executables
        arrived = executables.take_arrived(self.cluster.reserve_temporaries)
        if arrived:
            warming = self.readiness.busy
            self.readiness.arrived(arrived)
            if warming and not self.readiness.busy and self._is_complete:
                executables.set_complete()
            self.transformations.retry()
        return bool(arrived)

    @property
    def _is_complete(self) -> bool:
        return {it.degree for it in self.readiness.degrees} == set(self.cluster.sub_meshes.degrees())

    def warm_up_beside(self, degrees: list[int]) -> int:
        """Have all programs of some degrees, and of transformations between them, compiled while requests run, those of
        the present degree first. Return how many are missing.

        Where these are all degrees, the registry is `complete` once the last has come.
        """
        for tp in degrees:
            self.cluster.sub_meshes.check_degree(tp)
        present = self.instances[0].tp
        order = tuple(sorted(set(degrees), key=lambda tp: (tp != present, tp)))
        executables = self.cluster.executables
        by_degree = catalogue_by_degree(self.cluster.plan, executables, order)
        missing = executables.compile_later(request for mine in by_degree.values() for request in mine)
        self.readiness.begin(by_degree, missing)
        if not missing and self._is_complete:
            executables.set_complete()
        return len(missing)

    def awaits_program(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence cannot be placed yet for want of a program, which is compiled meanwhile."""
        executables, wanted = self.cluster.executables, []
        for instance in self.instances:
            if sequence.sampling.uses_state:
                wanted.append(executables.requests.set_state(instance.group, instance.num_slots))
            # A leader waits for what its siblings need: they share its prompt's pages only while it runs.
            if sequence.siblings or (sequence.leader is not None and sequence.leader.slot >= 0):
                wanted.append(instance.page_copy_request)
        return bool(wanted) and not executables.request(wanted)

    def collect(self) -> None:
        """Take in the results that have arrived, in the order of their steps."""
        for instance in self.instances:
            while instance.pending and instance.pending[0].done:
                self.results.take(instance, instance.pending.popleft())
        self.transformations.collect()

    def drain(self) -> None:
        """Wait for all launched steps and take in their results."""
        for instance in self.instances:
            self._drain(instance)
        self.transformations.collect()

    def _drain(self, instance: Instance) -> None:
        while instance.pending:
            self.results.take(instance, instance.pending.popleft())

    def _share_out(self) -> None:
        """Put the waiting sequences in order, by their clients' shares."""
        if self._shared_at == self.num_changes:
            return
        self._shared_at = self.num_changes
        running = [sequence for instance in self.instances for sequence in instance.running]
        clients = {*self.waiting.clients, *(sequence.client for sequence in running if not sequence.finished)}
        if len(clients) < 2 and not self._has_shares:
            return  # one client's requests need not be gone through
        self._has_shares = len(clients) > 1
        slots = sum(instance.max_running for instance in self.instances)
        tokens = sum(instance.capacity_tokens for instance in self.instances)
        if mark_beyond_share(running, self.waiting, slots, tokens):
            self.waiting.sort()
            self._num_changes += 1
            self._shared_at = self.num_changes

    def _admit(self) -> None:
        """Place waiting sequences, in order: none overtakes within a rank, so none starves."""
        self._share_out()
        if self.scheduler_hook is not None:
            self.scheduler_hook.schedule()
            return
        for sequence in self.deadlines.expired(time.monotonic()):
            self.reject(sequence, DeadlineError("deadline exceeded while the request was queued"))
        while (sequence := next((s for s in self.waiting if not self.awaits_program(s)), None)) is not None:
            if sequence.num_in_flight:
                return  # preempted a moment ago: its last token is not known yet
            instance = self.room.choose(sequence)
            if instance is not None:
                self.waiting.remove(sequence)
                self._place(instance, sequence)
            elif self._fits_nowhere(sequence):
                capacity = max(instance.capacity_tokens for instance in self.instances)
                message = (
                    f"it needs {sequence.max_total_tokens} tokens, and no instance holds more than {capacity} any more"
                )
                self.reject(sequence, RequestError(message))
            elif not self._preempt_lower_rank(sequence):
                return

    def _fits_nowhere(self, sequence: Sequence) -> bool:
        """It came before instances became smaller, or before those failed that should have become larger."""
        if self.transformations.busy or self.cluster.lost:
            return False  # there may be larger ones again
        return all(i.capacity_tokens < sequence.max_total_tokens for i in self.instances)

    # For a scheduler

    def start(self, instance: Instance, sequence: Sequence) -> None:
        """Let a waiting sequence run. Raises `RequestError`, with nothing changed, if it cannot run there now."""
        most = sequence.max_total_tokens
        if sequence not in self.waiting or sequence.num_in_flight:
            raise RequestError(f"request {sequence.request_id!r} does not wait")
        if instance.transition is not None:
            raise RequestError(f"instance {instance.id} is being transformed")
        if instance.capacity_tokens < most:
            raise RequestError(f"instance {instance.id} holds {instance.capacity_tokens} tokens, and it needs {most}")
        if not self.room.has_room(instance, sequence):
            raise RequestError(f"instance {instance.id} has no room for {sequence.num_known} tokens now")
        self.waiting.remove(sequence)
        self._place(instance, sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence off its instance; it waits, and is computed again from its tokens.

        Raises `RequestError`, with nothing changed, if it does not run, or where its instance is being transformed.
        """
        if sequence.slot < 0:
            raise RequestError(f"request {sequence.request_id!r} does not run")
        home = self.room.home(sequence)
        if home.transition is not None:
            raise RequestError(f"instance {home.id} is being transformed")
        self._preempt(home, sequence)

    def _place(self, instance: Instance, sequence: Sequence) -> None:
        """Give a sequence its pages and a slot. Whatever fails of that ends this sequence, and no other."""
        try:
            if self.room.leader_home(sequence) is instance:
                self._fork(instance, sequence)
            else:
                sequence.pages = instance.cache.match(self.room.reusable_keys(sequence))
                sequence.num_computed = sequence.pages.num_pages * self.dims.page_size
                instance.cache.reserve(sequence.pages, sequence.num_known)
            instance.add(sequence)
        except Exception as error:
            if sequence.pages is not None:
                instance.cache.release(sequence.pages)
                sequence.pages = None
            self.reject(sequence, error)
            self.recovery.check(instance, error)
            return
        first = sequence.started_at is None
        sequence.start()
        if first:
            sequence.num_cached = sequence.num_computed
            self.stats.cached_tokens += sequence.num_computed

    def _fork(self, instance: Instance, sequence: Sequence) -> None:
        """Share the pages of the leader's prompt. The last token is computed again, in a copy of its page."""
        leader = sequence.leader
        assert leader is not None, "only a sibling forks"
        assert leader.pages is not None, "it runs here"
        instance.page_copy_program()  # before anything changes: it may fail
        last = len(sequence.prompt) - 1
        table = leader.pages.table[:, : self.dims.pages.pages_for(len(sequence.prompt))]
        instance.pages.share(table)
        sequence.pages = SequencePages(instance.pages, table)
        sequence.num_computed = last
        copied = instance.cache.make_private(sequence.pages, last // self.dims.page_size)
        assert copied is not None, "the leader has it too"
        instance.copy_page(*copied)

    def _preempt_lower_rank(self, sequence: Sequence) -> bool:
        """Preempt sequences that rank behind this one where that makes enough room for this one."""
        found = self.room.victims(sequence)
        if found is None:
            return False
        instance, victims = found
        for victim in victims:
            self._preempt(instance, victim)
        return True

    def _preempt(self, instance: Instance, sequence: Sequence) -> None:
        """Take a sequence's pages; it waits, first of its priority, and is computed again from its tokens.

        A token of it that is in flight arrives all the same.
        """
        self._retire(instance, sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        sequence.wait_again()
        self.stats.preemptions += 1
        self.siblings.release(sequence)
        self._enqueue(sequence)

    def _retire(self, instance: Instance, sequence: Sequence) -> None:
        """Take a sequence off its instance. What it computed stays in the cache while there is room."""
        self._cache_pages(instance, sequence)
        instance.remove(sequence)
        self._num_changes += 1

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
        plan = self._plan(instance)
        if plan is None:
            return False
        try:
            instance.launch_plan(plan)
        except StepNotLaunchedError as error:
            self._refuse(instance, plan, error)
            return self._launch(instance)
        except Exception as error:
            self._failed(instance, error, plan.rows)
            return True
        self._count(plan)
        for sequence in self._end_prompts(plan):
            self._cache_pages(instance, sequence)
        return True

    def _plan(self, instance: Instance) -> StepPlan | None:
        """The next step whose programs are there: sequences that can do without those of the best one go on.

        Where someone cannot, programs with which any number can are compiled first; those of the best step come
        when nothing else is waited for.
        """
        running, buckets = instance.running, instance.buckets
        best = plan_step(running, buckets, instance.num_launched % 2 == 0)
        if best is None or instance.can_launch(best):
            return best
        other = next((plan for plan in other_plans(running, buckets) if instance.can_launch(plan)), None)
        alike = [i for i in self.instances if i.tp == instance.tp and i.released == instance.released]
        executables = self.cluster.executables
        if best.logits_of == "all":
            executables.request(request for i in alike for request in i.requests(best))
            return other
        if other is None or len(other.rows) < len(best.rows):
            kinds: set[SamplerKind] = {sequence.sampling.kind for sequence in running if sequence.num_left > 0}
            for shape in roomy_shapes(running, buckets):
                for kind in sorted(kinds, reverse=True):
                    executables.request(request for i in alike for request in i.step_requests(shape, "last", kind))
        executables.compile_later(request for i in alike for request in i.requests(best))
        return other

    def _end_prompts(self, plan: StepPlan) -> list[Sequence]:
        """The sequences whose prompt is through with a step that was launched: their siblings may begin."""
        ended = [r.sequence for r in plan.rows if r.start < len(r.sequence.prompt) <= r.start + r.length]
        for sequence in ended:
            self.siblings.release(sequence)
        return ended

    def _refuse(self, instance: Instance, plan: StepPlan, error: StepNotLaunchedError) -> None:
        """End the sequence of a step that could not be prepared which most likely is why, so that the others can go on.

        Sequences differ in the programs that sample them: the last in order of those that need the rarest.
        """
        kinds = ("greedy", "draw", "full")
        sequence = max((row.sequence for row in plan.rows), key=lambda s: (kinds.index(s.sampling.kind), s.order))
        cause = error.__cause__
        if isinstance(cause, MemoryBudgetError):
            cause = RequestError(str(cause))
        self.reject(sequence, cause if isinstance(cause, Exception) else error)

    def _failed(self, instance: Instance, error: Exception, rows: Iterable[Row]) -> None:
        """A step failed on its devices: see `Recovery`. A group between two layouts ends at the higher degree."""
        if instance.transition is not None:
            self.transformations.lost(instance, error, rows)
        else:
            self.recovery.recover(instance, error, rows)

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

    def fail(self, error: BaseException) -> None:
        """End every request with an error: a step failed, and the donated cache with it."""
        self.transformations.fail(error)
        sequences = [*self.waiting, *self.siblings.held]
        sequences += [s for instance in self.instances for s in instance.running]
        sequences += [sibling for sequence in sequences for sibling in sequence.siblings]
        self.waiting.clear()
        self.siblings.clear()
        for instance in self.instances:
            instance.running.clear()
            instance.pending.clear()
        for sequence in sequences:
            sequence.fail(error)
            self._report(Update(sequence, finished=True))

    def close(self) -> None:
        """Drop every device buffer."""
        self.cluster.executables.background.close()
        self.cluster.close()
