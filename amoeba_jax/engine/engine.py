"""The engine: the instances, the requests, and the methods for one turn of the loop that serves the requests.

`Dispatcher` runs the loop in one thread. A turn of the loop has three parts:

1. `Dispatcher` runs methods for other threads, such as `submit`, `finish` and `transform`.
2. `collect`: take the results of finished steps. End the changes of degrees and placements that are complete.
3. `advance`: continue the changes whose programs are now compiled. Start waiting sequences, as the scheduler or
   `Admission` decides. Launch a step on each instance that has fewer than two steps in flight (`Steps.launch`).

While a device computes one step, the host takes the results of the previous step.
"""

import itertools
import time
from concurrent.futures import Future
from typing import Protocol

from amoeba_jax.engine.admission import Admission
from amoeba_jax.engine.background_warmup import BackgroundWarmup
from amoeba_jax.engine.sequences import Sequences
from amoeba_jax.engine.steps import Steps
from amoeba_jax.errors import ContextLengthError, RequestError
from amoeba_jax.instances.cluster import REVIVE_INTERVAL_S, Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.stats import EngineStats
from amoeba_jax.transform.changes import Changes
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.report import TransformReport

ENOUGH_TOKENS = 512
"""Number of output tokens that is enough for a usual answer. Used by `Engine.default_max_tokens`."""


class SchedulerHook(Protocol):
    """Interface of a scheduler that decides where the waiting sequences of an engine run.

    Attributes:
        interval_s: maximum time between two calls of `schedule`, in seconds.
    """

    interval_s: float

    def schedule(self) -> None:
        """Start, preempt or reject sequences, or change instances, as the scheduler decides.

        An implementation calls `Engine.transform`, `Sequences.reject` and the methods of `Engine.admission`. A waiting
        sequence that is neither started nor rejected stays in `Engine.waiting`.

        The engine calls this method in the dispatcher thread. The method must not wait for a device.

        `Sequences.num_changes` counts the events that may let a waiting sequence start. If the number has not changed
        since the previous call of `schedule`, no such event has happened since then.
        """
        ...


class Engine:
    """Instances and requests behind the Python API (`LLM`).

    All methods run in the dispatcher thread, except `check_request` and `default_max_tokens`.

    Attributes:
        waiting: queue of waiting sequences. The first sequence in the queue starts first.
        scheduler_hook: scheduler that starts sequences and changes instances. If None, `Admission` starts sequences,
            and instances change only when `transform` or `Changes.request` is called.
        closing: whether `close` will be called soon. If True, a warm-up in progress ends early with an error. Any
            thread may set `closing`.
    """

    def __init__(self, cluster: Cluster):
        self.cluster, self.config, self.dims = cluster, cluster.config, cluster.dims
        self.max_model_len = cluster.max_model_len
        self.stats = stats = EngineStats()
        self.sequences = sequences = Sequences(cluster, stats)
        self.waiting = sequences.waiting
        self.changes = Changes(cluster, sequences.preempt)
        self.steps = Steps(cluster, sequences, self.changes, stats)
        self.admission = Admission(cluster, sequences, self.changes, self.steps, stats)
        self.background_warmup = BackgroundWarmup(cluster)
        self.scheduler_hook: SchedulerHook | None = None
        self.closing = False
        self._numbers = itertools.count()

    # The loop

    def collect(self) -> None:
        """Take the results of finished steps. Then end the changes of degrees and placements that are complete."""
        for instance in self.cluster.all_instances:
            while instance.pending and instance.pending[0].done:
                self.steps.take(instance, instance.pending.popleft())
        self.changes.collect()

    def advance(self) -> bool:
        """Continue changes, start waiting sequences, and launch at most one step on each instance.

        Return whether anything was launched. If True, call `advance` again, because more launches may be possible.
        Raises `RuntimeError` if nothing is running and the waiting requests can never be served.
        """
        if arrived := self.background_warmup.take_arrived():
            self.changes.retry()
        if arrived or self.cluster.revive():
            self.sequences.num_changes += 1

        self.sequences.share_out()
        if self.scheduler_hook is not None:
            self.scheduler_hook.schedule()
        else:
            self.admission.admit()

        launched = False
        for instance in self.instances:
            if instance in self.instances:  # an earlier launch may have ended a change, which replaced this instance
                launched |= self.steps.launch(instance)

        pending = any(instance.pending for instance in self.cluster.all_instances)
        self.cluster.executables.background.serving = pending  # without steps in flight, all threads may compile
        if not launched and not pending:
            self._check_progress()
        return launched

    def _check_progress(self) -> None:
        busy = self.cluster.executables.background.num_left or self.changes.busy
        # Requests may wait for a decision of the scheduler, for devices out of service, or for paused requests.
        may_wait = self.scheduler_hook is not None or self.cluster.lost or self.num_paused
        if self.has_requests and not busy and not may_wait:
            raise RuntimeError(f"{len(self.waiting)} waiting requests cannot be served and nothing is running")

    def drain(self) -> None:
        """Wait for all steps in flight, and take their results. Then end the changes that are complete."""
        for instance in self.cluster.all_instances:
            while instance.pending:
                self.steps.take(instance, instance.pending.popleft())
        self.changes.collect()

    @property
    def interval_s(self) -> float | None:
        """Maximum time between two turns of the loop, in seconds. None: no limit."""
        if self.cluster.lost:
            return REVIVE_INTERVAL_S
        return None if self.scheduler_hook is None else self.scheduler_hook.interval_s

    def fail(self, error: BaseException) -> None:
        """End all changes and all requests with `error`, because the engine ends."""
        self.changes.fail(error)
        self.sequences.fail_all(error)

    def close(self) -> None:
        """Stop the compile threads and free all device buffers."""
        self.cluster.executables.background.close()
        self.cluster.close()

    # Requests

    def check_request(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise `ContextLengthError` if a request is too long for the model's context or for every instance.

        Transformations in progress count as complete. If a scheduler may change the degrees, the check includes
        instances of every possible degree (`_capacities`). Any thread may call this method.
        """
        total = num_prompt_tokens + max_tokens
        if not self.instances:
            return  # the engine is closed, and the next call raises the error for that
        capacity, tp = max(self._capacities())
        limit = min(self.max_model_len, capacity)
        if total > limit:
            raise ContextLengthError(
                f"prompt of {num_prompt_tokens} tokens plus max_tokens={max_tokens} is {total} tokens, over the "
                f"limit of {limit}: the model's context is {self.max_model_len} and the KV cache of a "
                f"TP{tp} instance holds {capacity}"
            )

    def default_max_tokens(self, num_prompt_tokens: int) -> int:
        """Return the number of tokens that a request may generate if its caller sets no limit.

        Each instance has a free space: the number of tokens that fit after the prompt, both in the KV cache of the
        instance and in the model's context. The result is the smallest free space of at least `ENOUGH_TOKENS` tokens.
        If every free space is smaller, the result is the largest free space, but at least 1. Example: if one instance
        has a free space of 200 tokens, and another instance has 3,200 tokens, the result is 3,200, because 200 tokens
        are not enough. Any thread may call this method.
        """
        free = sorted(min(self.max_model_len, it) - num_prompt_tokens for it, _ in self._capacities()) or [1]
        return max(1, next((it for it in free if it >= ENOUGH_TOKENS), free[-1]))

    def _capacities(self) -> list[tuple[int, int]]:
        """Return `(capacity in tokens, degree)` for each instance. Transformations in progress count as complete.

        If there is a scheduler, and no instance has data-parallel attention, the result also has a pair for every
        possible degree, because the scheduler may change the degrees.
        """
        instances = self.instances
        found = [self.changes.capacity_to_come(instance) for instance in instances]
        if self.scheduler_hook is not None and not any(instance.has_parallel_attention for instance in instances):
            found += [(self.capacity_tokens(degree), degree) for degree in self.cluster.plan.degrees]
        return found

    def submit(self, sequences: list[Sequence]) -> None:
        """Add the leaders (first samples) of new requests to the queue. Skip leaders that are already cancelled.

        The caller has already checked the requests with `check_request`. Each request is checked again here, because
        instances may have become smaller since then. A request that no longer fits ends with an error.
        """
        for sequence in [sequence for sequence in sequences if not sequence.finished]:
            number = next(self._numbers)
            for each in (sequence, *sequence.siblings):
                each.number = number
            try:
                self.check_request(len(sequence.prompt), sequence.params.max_tokens)
                self.sequences.enqueue(sequence)
            except Exception as error:
                self.sequences.reject(sequence, error)

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting, running or paused."""
        # Siblings that are not held wait for their leader. The leader counts here.
        return bool(len(self.waiting) or self.sequences.siblings.held or self.sequences.running)

    @property
    def num_paused(self) -> int:
        """Number of paused sequences."""
        return sum(len(instance.paused_sequences) for instance in self.instances)

    # Layout

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Instances that serve requests, sorted by the index of their first device.

        Paused instances are left out. A paused instance keeps its requests while a merged instance serves on its
        devices.
        """
        return self.cluster.instances

    def capacity_tokens(self, tp: int) -> int:
        """Return the number of tokens that fit in the KV cache of an instance of degree `tp`.

        This KV cache includes the memory of all weights that an instance of degree `tp` does not need.
        """
        return self.cluster.plan.capacity_tokens(tp, tp)

    def transform(self, options: TransformOptions, wait_for_programs: bool = True) -> "Future[TransformReport]":
        """Begin to change the degree of instances while requests run. Return a future of the report.

        `LLM.transform` explains the options. Raises `LayoutError`, `RequestError`, `MemoryBudgetError` or
        `TransformError` if the transformation cannot begin. If `wait_for_programs` is False, and the background warm-up
        is still compiling programs of the new degree, raises `ProgramsNotReadyError`. After an error, nothing has
        changed.
        """
        degree = options.tensor_parallel_size
        self.cluster.sub_meshes.check_degree(degree)
        if not wait_for_programs:
            self.background_warmup.check(degree)
        if self.scheduler_hook is None:
            self.admission.check_waiting(options)
        return self.changes.request(options)

    def limit_batch(self, instance_id: int, size: int | None) -> None:
        """Limit the number of running sequences of an instance to `size`. None: only the slots limit the number.

        If more sequences run already, they continue. Raises `RequestError` if the instance does not exist, or if `size`
        is below 1.
        """
        instance = self.cluster.instance(instance_id)
        if size is not None and size < 1:
            raise RequestError(f"a batch of {size} is not possible: it must be at least 1")
        instance.limit_batch(size)
        self.sequences.num_changes += 1

    def end_transformations(self) -> None:
        """Run turns of the loop until all changes of degrees and placements have ended."""
        while self.changes.busy:
            self.advance()
            self.drain()
            self.changes.wait()
            if self.changes.awaits_programs:
                self.cluster.executables.background.wait()

    def set_layout(self, tp: int, *, release_weights: bool = True) -> float:
        """Merge or split all instances to degree `tp`. Return the duration of the change in seconds.

        `LLM.transform` explains `release_weights`. Raises `LayoutError` if degree `tp` is not possible. Raises
        `RequestError` if requests are waiting, running or paused, or if another change is in progress.
        """
        self.cluster.sub_meshes.check_degree(tp)
        self.check_idle("the layout cannot change")
        start = time.perf_counter()
        devices = tuple(range(len(self.cluster.sub_meshes.devices)))
        report = self.transform(TransformOptions(tp, devices, release_weights=release_weights))
        self.end_transformations()
        report.result()
        return time.perf_counter() - start

    def check_idle(self, problem: str) -> None:
        """Wait for all steps in flight. Then raise `RequestError` if there are requests or unfinished changes.

        The message of the error starts with `problem`.
        """
        self.drain()
        if self.has_requests or self.changes.busy:
            running, paused = sum(len(instance.running) for instance in self.instances), self.num_paused
            raise RequestError(
                f"{problem} with {running} running, {paused} paused and {len(self.waiting)} waiting requests: "
                "wait for them to finish, or use transform()"
            )
