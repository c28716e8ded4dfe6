"""Instances, their requests, and the step that moves all of them forward."""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future

import jax

from amoeba_jax.config import EngineConfig
from amoeba_jax.engine.admission import SequenceAdmission
from amoeba_jax.engine.background_warmup import BackgroundWarmup
from amoeba_jax.engine.launching import Launching
from amoeba_jax.engine.recovery import Recovery
from amoeba_jax.engine.results import Results
from amoeba_jax.engine.scheduler_hook import SchedulerHook
from amoeba_jax.engine.sequences import Sequences
from amoeba_jax.errors import RequestError
from amoeba_jax.instances.cluster import REVIVE_INTERVAL_S, Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.queue import Waiting
from amoeba_jax.instances.room import Room
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.models.dims import ModelDims
from amoeba_jax.outputs import FinishReason
from amoeba_jax.stats import EngineStats
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.report import TransformReport
from amoeba_jax.transform.transformations import Transformations
from amoeba_jax.weights.loading import OpenWeights


class Engine:
    """Everything behind the API, driven by one thread: all methods run in the dispatcher thread.

    The loop is `advance` (launch steps), wait for a result, `collect` (take in what has arrived). Each instance has up
    to two steps launched: the device computes one while the host takes in the results of the one before it.

    Construction loads the weights, and meanwhile begins to compile the programs of the degrees `compile_first`.
    `on_load(name)` is called after each parameter.

    Attributes:
        on_result: called from other threads whenever `collect` has something to take; must not block.
        scheduler_hook: decides where sequences go, and when instances change; None: the engine places them itself, and
            instances change only when told to.
        closing: `close` comes next, from any thread: a warm-up ends before its next program.
    """

    def __init__(
        self,
        config: EngineConfig,
        dims: ModelDims,
        devices: tuple[jax.Device, ...],
        open_weights: OpenWeights,
        on_load: Callable[[str], None],
        compile_first: tuple[int, ...] = (),
    ):
        self.config, self.dims = config, dims
        self.cluster = Cluster(config, dims, devices, open_weights, on_load, compile_first)
        self.cluster.on_result = self.cluster.executables.background.on_arrival = lambda: self.on_result()
        self.max_model_len = self.cluster.max_model_len
        self.stats = EngineStats()
        self.room = Room(self.cluster)
        self.sequences = sequences = Sequences(self.cluster, self.room, self.stats)
        self.recovery = Recovery(self.cluster, sequences.preempt, sequences.reject, self.stats)
        self.transformations = Transformations(self.cluster, self._drain, sequences.preempt)
        self.launching = Launching(self.cluster, sequences, self.transformations, self.recovery, self.stats)
        self.results = Results(sequences, self.launching.failed, self.recovery, self.stats)
        self.admission = SequenceAdmission(
            self.cluster, sequences, self.room, self.transformations, self.launching, self.stats
        )
        self.scheduler_hook: SchedulerHook | None = None
        self.background_warmup = BackgroundWarmup(self.cluster)
        self.closing = False
        self._shared_at = 0
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
            self.background_warmup.check(degree)
        if self.scheduler_hook is None:
            self.admission.check_waiting(options)
        return self.transformations.request(options)

    def end_transformations(self) -> None:
        """Go on, and wait, until no transformation is under way."""
        while self.transformations.busy:
            self.advance()
            self.drain()
            self.transformations.wait()
            if self.transformations.awaits_programs:
                self.cluster.executables.background.wait()

    def set_layout(self, tp: int, *, release_weights: bool = True) -> float:
        """Regroup all devices into instances of degree `tp`; returns the seconds it took. See `transform`.

        Raises `RequestError` while requests are waiting or running.
        """
        self.cluster.sub_meshes.check_degree(tp)
        self.check_idle("the layout cannot change")
        start = time.perf_counter()
        devices = tuple(range(len(self.cluster.sub_meshes.devices)))
        report = self.transform(TransformOptions(tp, devices, release_weights=release_weights))
        self.end_transformations()
        report.result()
        return time.perf_counter() - start

    def check_idle(self, what: str) -> None:
        """Raise `RequestError`, saying what cannot be, while requests are waiting or running."""
        self.drain()
        if self.has_requests or self.transformations.busy:
            running, paused = sum(len(instance.running) for instance in self.instances), self.num_paused
            raise RequestError(
                f"{what} with {running} running, {paused} paused and {len(self.waiting)} waiting requests: "
                "wait for them to finish, or use transform()"
            )

    def capacity_tokens(self, tp: int) -> int:
        """Tokens that an empty instance of degree `tp` holds, with the weights released that its ranks do not need."""
        return self.cluster.capacity_tokens(tp, tp)

    @property
    def num_paused(self) -> int:
        """Requests that are paused."""
        return sum(len(instance.paused_sequences) for instance in self.instances)

    @property
    def num_changes(self) -> int:
        """Grows with whatever may let a waiting sequence go on: one came, ended, lost its pages, or got its last token
        after it had lost them."""
        return self.sequences.num_changes + self.results.num_arrived

    @property
    def interval_s(self) -> float | None:
        """Seconds after which `advance` is to be called though nothing has happened; None: no such time."""
        if self.cluster.lost:
            return REVIVE_INTERVAL_S
        return None if self.scheduler_hook is None else self.scheduler_hook.interval_s

    @property
    def has_requests(self) -> bool:
        """Requests are waiting, running or paused. (Siblings wait for one that is, or are held for want of slots.)"""
        waiting = len(self.waiting) > 0 or bool(self.sequences.siblings.held)
        return waiting or any(instance.running for instance in self.cluster.all_instances)

    # Requests

    def check_request(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise `RequestError` for a request that no instance can hold when the transformations under way are through,
        or, with a `scheduler_hook` that may change the layout, none of any layout. May be called by any thread."""
        total = num_prompt_tokens + max_tokens
        if not (instances := self.instances):
            return  # closed: whatever is asked next says so
        capacity, tp = max(map(self.transformations.capacity_to_come, instances))
        if self.scheduler_hook is not None:
            degrees = self.cluster.plan.degrees
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
                self.sequences.enqueue(sequence)
            except Exception as error:
                self.reject(sequence, error)

    @property
    def waiting(self) -> Waiting:
        """Requests in the queue, in the order in which they are served."""
        return self.sequences.waiting

    def finish(self, sequences: list[Sequence], reason: FinishReason, stop_reason: str | None = None) -> None:
        """See `Sequences.finish`."""
        self.sequences.finish(sequences, reason, stop_reason)

    def reject(self, sequence: Sequence, error: Exception) -> None:
        """See `Sequences.reject`."""
        self.sequences.reject(sequence, error)

    # Steps

    def advance(self) -> bool:
        """Admit what fits, and launch one step on each instance that has room for it (`MAX_PENDING_STEPS`).

        Returns whether anything was launched: call it again then, as there may be more to launch.
        Raises `RuntimeError` if there is work and nothing can ever move it.
        """
        if arrived := self.background_warmup.take_arrived():
            self.transformations.retry()
        if arrived or self.cluster.revive():
            self.sequences.num_changes += 1
        self._admit()
        launched = False
        for instance in self.instances:
            if instance in self.instances:  # not replaced meanwhile: a launch may end or fail a transformation
                launched |= self.launching.launch(instance)
        pending = any(instance.pending for instance in self.cluster.all_instances)
        # Requests that all wait for programs are not disturbed by those who compile them.
        self.cluster.executables.background.serving = pending
        if self.scheduler_hook is not None or self.cluster.lost or self.num_paused:
            return launched  # what waits may wait for its decision, for devices out of service, or for paused requests
        compiling = self.cluster.executables.background.num_left
        if not launched and not pending and not compiling and not self.transformations.busy and self.has_requests:
            raise RuntimeError(f"{len(self.waiting)} waiting requests cannot be served and nothing is running")
        return launched

    def collect(self) -> None:
        """Take in the results that have arrived, in the order of their steps."""
        for instance in self.cluster.all_instances:
            while instance.pending and instance.pending[0].done:
                self.results.take(instance, instance.pending.popleft())
        self.transformations.collect()

    def drain(self) -> None:
        """Wait for all launched steps and take in their results."""
        for instance in self.cluster.all_instances:
            self._drain(instance)
        self.transformations.collect()

    def _drain(self, instance: Instance) -> None:
        while instance.pending:
            self.results.take(instance, instance.pending.popleft())

    def _admit(self) -> None:
        """Start what can start."""
        if self._shared_at != self.num_changes:
            self._shared_at = self.num_changes
            self.sequences.share_out()
            self._shared_at = self.num_changes
        if self.scheduler_hook is not None:
            self.scheduler_hook.schedule()
        else:
            self.admission.admit()

    def fail(self, error: BaseException) -> None:
        """End every request with an error: a step failed, and the donated cache with it."""
        self.transformations.fail(error)
        self.sequences.fail_all(error)

    def close(self) -> None:
        """Drop every device buffer."""
        self.cluster.executables.background.close()
        self.cluster.close()
