"""The engine: instances, their requests, and one turn of the loop that serves them.

`Dispatcher` runs the loop in one thread. A turn of the loop:

1. `Dispatcher` runs the calls of other threads, such as `submit`, `finish` and `transform`.
2. `collect`: take the results of finished steps. End each change of degree or placement that is now complete.
3. `advance`: continue changes whose programs are now compiled. Start waiting sequences, as the scheduler or `Admission`
   decides. Launch a step on each instance that has fewer than two steps in flight (`Steps.launch`).

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
"""Enough tokens for a usual answer. See `Engine.default_max_tokens`."""


class SchedulerHook(Protocol):
    """Interface of a scheduler that decides where the waiting sequences of an engine run.

    Attributes:
        interval_s: longest time between two calls of `schedule`, in seconds.
    """

    interval_s: float

    def schedule(self) -> None:
        """Start, preempt or reject sequences, or change instances, as the scheduler decides.

        An implementation calls `Engine.transform`, `Sequences.reject` and the methods of `Engine.admission`. Waiting
        sequences that are neither started nor rejected stay in `Engine.waiting`.

        `Sequences.num_changes` counts the events that may let a waiting sequence start. If the number is the same as in
        the previous call, there was no such event. Runs in the dispatcher thread, and must not wait for a device.
        """
        ...


class Engine:
    """State behind the Python API: the instances and their requests.

    All methods run in the dispatcher thread, except `check_request` and `default_max_tokens`.

    Attributes:
        waiting: queue of sequences, in the order in which the sequences start.
        scheduler_hook: scheduler that starts sequences and changes instances. If None, `Admission` starts sequences,
            and instances change only when `transform` or `Changes.request` is called.
        closing: whether `close` will be called soon. Any thread may set `closing`. If `closing` is True, a warm-up ends
            before its next program.
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
        """Take the results of finished steps, and end each change of degree or placement that is now complete."""
        for instance in self.cluster.all_instances:
            while instance.pending and instance.pending[0].done:
                self.steps.take(instance, instance.pending.popleft())
        self.changes.collect()

    def advance(self) -> bool:
        """Continue changes, start waiting sequences, and launch one step on each instance that can take a step.

        Return whether anything was launched. If True, call `advance` again, because more launches may be possible.
        Raises `RuntimeError` if requests are left that can never be served.
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
            if instance in self.instances:  # a launch may end a change, which replaces other instances
                launched |= self.steps.launch(instance)

        pending = any(instance.pending for instance in self.cluster.all_instances)
        self.cluster.executables.background.serving = pending  # without steps in flight, all threads may compile
        if not launched and not pending:
            self._check_progress()
        return launched

    def _check_progress(self) -> None:
        busy = self.cluster.executables.background.num_left or self.changes.busy
        # Requests may wait for a decision of the scheduler, for lost devices, or for paused requests.
        may_wait = self.scheduler_hook is not None or self.cluster.lost or self.num_paused
        if self.has_requests and not busy and not may_wait:
            raise RuntimeError(f"{len(self.waiting)} waiting requests cannot be served and nothing is running")

    def drain(self) -> None:
        """Wait for all steps in flight and take their results."""
        for instance in self.cluster.all_instances:
            while instance.pending:
                self.steps.take(instance, instance.pending.popleft())
        self.changes.collect()

    @property
    def interval_s(self) -> float | None:
        """Longest time between two turns of the loop, in seconds. None: no limit."""
        if self.cluster.lost:
            return REVIVE_INTERVAL_S
        return None if self.scheduler_hook is None else self.scheduler_hook.interval_s

    def fail(self, error: BaseException) -> None:
        """End all changes and all requests with an error, because the engine ends."""
        self.changes.fail(error)
        self.sequences.fail_all(error)

    def close(self) -> None:
        """Stop the compile threads and free all device buffers."""
        self.cluster.executables.background.close()
        self.cluster.close()

    # Requests

    def check_request(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise `ContextLengthError` if a request is too long for the model or for every instance.

        If transformations are in progress, the check uses the capacities that the instances will have afterwards. Any
        thread may call this.
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

        For each instance, take the number of tokens that fit after the prompt and in the model's context. Return the
        smallest of these numbers that is at least `ENOUGH_TOKENS`. If there is none, return the largest number, or 1 if
        that is larger. Example: a prompt leaves 200 tokens on one instance and 3,200 tokens on another. 200 tokens are
        not enough, so the result is 3,200. Any thread may call this.
        """
        free = sorted(min(self.max_model_len, it) - num_prompt_tokens for it, _ in self._capacities()) or [1]
        return max(1, next((it for it in free if it >= ENOUGH_TOKENS), free[-1]))

    def _capacities(self) -> list[tuple[int, int]]:
        """Return `(capacity in tokens, degree)` for each instance. Transformations in progress count as complete.

        If a scheduler may change the degrees, the result also has a pair for every possible degree. A scheduler may not
        change the degrees while an instance has data-parallel attention.
        """
        instances = self.instances
        found = [self.changes.capacity_to_come(instance) for instance in instances]
        if self.scheduler_hook is not None and not any(instance.has_parallel_attention for instance in instances):
            found += [(self.capacity_tokens(degree), degree) for degree in self.cluster.plan.degrees]
        return found

    def submit(self, sequences: list[Sequence]) -> None:
        """Add sequences to the queue, except sequences that are already cancelled.

        The caller has already checked the sequences with `check_request`. Each sequence is checked again here, because
        instances may have become smaller. A sequence that no longer fits ends with an error.
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
        # Other siblings wait for a sequence that counts here.
        return bool(len(self.waiting) or self.sequences.siblings.held or self.sequences.running)

    @property
    def num_paused(self) -> int:
        """Number of paused requests."""
        return sum(len(instance.paused_sequences) for instance in self.instances)

    # Layout

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Instances that serve requests, sorted by the index of their first device.

        Paused instances are left out. They keep requests while a merged instance serves on their devices.
        """
        return self.cluster.instances

    def capacity_tokens(self, tp: int) -> int:
        """Return the number of tokens that fit in the KV cache of an instance of degree `tp`.

        The KV cache of this instance includes the memory of all weights that degree `tp` does not need.
        """
        return self.cluster.plan.capacity_tokens(tp, tp)

    def transform(self, options: TransformOptions, wait_for_programs: bool = True) -> "Future[TransformReport]":
        """Begin to change the degree of instances while requests run. Return a future of the report.

        `LLM.transform` explains the options. Raises `LayoutError` or `RequestError` if the transformation is impossible
        now. With `wait_for_programs=False`, raises `ProgramsNotReadyError` if the background warm-up is still compiling
        programs of the new degree. After an error, nothing has changed.
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

        Sequences that run already are not stopped. Raises `RequestError` if the instance does not exist, or if `size`
        is below 1.
        """
        instance = self.cluster.instance(instance_id)
        if size is not None and size < 1:
            raise RequestError(f"a batch of {size} is not possible: it must be at least 1")
        instance.limit_batch(size)
        self.sequences.num_changes += 1

    def end_transformations(self) -> None:
        """Run the loop until all transformations and placement changes have ended."""
        while self.changes.busy:
            self.advance()
            self.drain()
            self.changes.wait()
            if self.changes.awaits_programs:
                self.cluster.executables.background.wait()

    def set_layout(self, tp: int, *, release_weights: bool = True) -> float:
        """Regroup all devices into instances of degree `tp`. Return the duration of the change in seconds.

        `LLM.transform` explains `release_weights`. Raises `RequestError` if requests are waiting, running or paused, or
        if another change is in progress.
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
        """Raise `RequestError` if there are requests, transformations or placement changes.

        First wait for all steps in flight. The message of the error starts with `problem`.
        """
        self.drain()
        if self.has_requests or self.changes.busy:
            running, paused = sum(len(instance.running) for instance in self.instances), self.num_paused
            raise RequestError(
                f"{problem} with {running} running, {paused} paused and {len(self.waiting)} waiting requests: "
                "wait for them to finish, or use transform()"
            )
