"""Transformations: which groups of devices change their degree, from the request to the report.

A group's transition has a point of no return: the switch of its first layer. What fails before it leaves the instances
as they were. What fails after it ends at the higher degree, whose weights are never given away, with all extents that
are not weights as an empty cache: the group's requests are computed again from their tokens.
"""

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import jax

from amoeba_jax.errors import MemoryBudgetError, RequestError, TransformError
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import Row, StepNotLaunchedError, StepPlan
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.sampling.rows import SamplerKind
from amoeba_jax.transform.distinct_pages import DistinctPages, deal, distinct_pages
from amoeba_jax.transform.job import Active, Job, TransformOptions, check_options, next_groups
from amoeba_jax.transform.movers import Mover, make_mover
from amoeba_jax.transform.needs import GroupChange, needed_programs, samplers, transition_programs
from amoeba_jax.transform.report import TransformReport, TransformVariant
from amoeba_jax.transform.restart import RestartError, check_growth, restart
from amoeba_jax.transform.transition import Member, Transition
from kvcache.allocator import OutOfPagesError
from kvcache.pages import PagePool, SequencePages
from kvcache.relayout import place_down, place_up
from sharding.mesh import disassemble

logger = logging.getLogger(__name__)


class Transformations:
    """Starts, advances and ends transitions of a cluster's instances. Used by the dispatcher thread only.

    Args:
        drain: waits for what an instance has launched, and takes in the results.
        requeue: takes a sequence off its instance, to be computed again.
        refuse: ends the sequence for which a step could not be prepared.
    """

    def __init__(
        self,
        cluster: Cluster,
        drain: Callable[[Instance], None],
        requeue: Callable[[Instance, Sequence], None],
        refuse: Callable[[Instance, StepPlan, StepNotLaunchedError], None],
    ):
        self._cluster, self._drain, self._requeue, self._refuse = cluster, drain, requeue, refuse
        self._jobs: list[Job] = []
        self._active: dict[Instance, Active] = {}
        self._settling: list[tuple[Active, Future[Any]]] = []

    @property
    def busy(self) -> bool:
        """A transformation has not ended yet."""
        return bool(self._jobs)

    @property
    def awaits_programs(self) -> bool:
        """A transformation cannot begin, or go on, before programs have come."""
        return any(job.awaits_programs for job in self._jobs)

    def targets(self) -> dict[int, int]:
        """Of every device that is being transformed, or is about to be, the degree to come.

        Groups of a job that have ended, or that will not begin as another has failed, are not among them.
        """
        targets: dict[int, int] = {}
        for job in (job for job in self._jobs if not job.awaits_programs):
            active = [*self._active.values(), *(active for active, _ in self._settling)]
            devices = {device for a in active if a.job is job for device in a.devices}
            if job.error is None:
                to_come = [i for i in self._cluster.instances if i.tp != job.options.tensor_parallel_size]
                devices |= {device for i in to_come for device in i.group.device_indices}
            targets |= dict.fromkeys(devices & set(job.options.devices), job.options.tensor_parallel_size)
        return targets

    def request_programs(self, options: TransformOptions) -> bool:
        """Whether a transformation could begin at once. If not, its programs are compiled meanwhile."""
        return self._request_programs(options, next_groups(options, self._cluster))

    def _request_programs(self, options: TransformOptions, groups: list[list[Instance]]) -> bool:
        wanted = [request for old in groups for request in needed_programs(self._cluster, options, old)]
        return self._cluster.executables.request(wanted)

    def capacity_to_come(self, instance: Instance, further: TransformOptions | None = None) -> tuple[int, int]:
        """Tokens that an instance of an instance's devices holds when all transformations are through, and its degree.

        `further` is one that has not been requested yet. May be called by any thread.
        """
        wanted = [job.options for job in list(self._jobs)] + ([] if further is None else [further])
        options = next((o for o in wanted if instance.id in o.devices), None)
        if options is None or options.tensor_parallel_size == instance.tp:
            return instance.capacity_tokens, instance.tp
        tp, released = options.tensor_parallel_size, instance.released
        if tp < instance.tp:
            released = min(released, tp)
        elif options.release_weights:
            released = max(released, tp)
        return self._cluster.capacity_tokens(tp, released), tp

    def request(self, options: TransformOptions) -> "Future[TransformReport]":
        """Start a transformation. Raises `LayoutError` or `RequestError`, with nothing changed, if it cannot be."""
        check_options(options, self._cluster, self._jobs)
        self._cluster.check_in_service(options.devices)
        job = Job(options)
        self._jobs.append(job)
        self._proceed(job)
        return job.future

    # The course of a job

    def _proceed(self, job: Job) -> None:
        """Start whatever transitions of a job can start now; report if there are none left."""
        if job.error is None:
            try:
                while not job.active and job.error is None and (groups := next_groups(job.options, self._cluster)):
                    job.awaits_programs = not self._request_programs(job.options, groups)
                    if job.awaits_programs:
                        return  # until `retry`
                    for old in groups:
                        self._begin(job, old)
                        if job.error is not None:
                            break  # a restart failed
            except Exception as error:
                for active in [a for a in self._active.values() if a.job is job and not a.transition.started]:
                    self._abort(active)
                    self._reserve(active.devices, 0)
                    job.active -= 1
                if not job.groups and not job.active:
                    self._jobs.remove(job)
                    if isinstance(error, OutOfPagesError | RequestError):
                        kind = type(error) if isinstance(error, RequestError) else RequestError
                        raise kind(f"the transformation is refused: {error}") from error
                    drop_frames(error)
                    degree = job.options.tensor_parallel_size
                    raise TransformError(
                        f"the transformation to TP{degree} failed: {error} (it had not begun; all is as it was)"
                    ) from error
                job.error = error
                job.outcomes.append("what had not begun is as it was")
        if job.active:
            return
        self._jobs.remove(job)
        job.end()

    def retry(self) -> None:
        """Programs have come: go on with jobs that wait for some."""
        for job in [job for job in self._jobs if job.awaits_programs]:
            try:
                self._proceed(job)
            except Exception as error:  # it cannot begin, and all is as it was
                job.future.set_exception(error)

    def _begin(self, job: Job, old: list[Instance]) -> None:
        for instance in old:
            self._drain(instance)
        if job.options.variant is TransformVariant.RESTART:
            self._restart(job, old)
            return
        try:
            active = self._begin_up(job, old) if len(old) > 1 else self._begin_down(job, old[0])
        except BaseException:
            for instance in old:
                self._reserve(instance.group.device_indices, 0)
                instance.cache.enabled = self._cluster.config.prefix_caching
            raise
        self._active[active.transition.instance] = active
        active.transition.instance.transition = active.transition
        job.active += 1

    def _restart(self, job: Job, old: list[Instance]) -> None:
        options = job.options
        try:
            done = restart(self._cluster, self._requeue, old, options.tensor_parallel_size, options.release_weights)
        except RestartError as error:
            devices = [device for instance in old for device in instance.group.device_indices]
            job.fail(error, devices, error.outcome)
        else:
            job.groups.append(done)

    def _begin_up(self, job: Job, old: list[Instance]) -> Active:
        cluster, geometry = self._cluster, self._cluster.dims.pages
        change = GroupChange.of(cluster, job.options, old)
        group, (before, after) = change.group, change.released
        rows = max(len(instance.running) for instance in old)
        distinct = [distinct_pages(instance.running, instance.tp) for instance in old]
        programs, mover, extra = self._prepare(job, change, rows, samplers(old), distinct)
        if programs.changes_weights:
            cluster.weights.prepare_release(group, before, after)
        for instance in old:
            instance.cache.clear()
        allocators = [cluster.new_allocator(after) for _ in group.devices]
        tables = place_up([d.table for d in distinct], [d.references for d in distinct], geometry, allocators)
        for instance in old:
            if instance.released < before:
                cluster.release_more(instance, before)
        tokens = [buffer for instance in old for buffer in disassemble(instance.group, instance.last_tokens)]
        new = cluster.new_instance(group, allocators, [[] for _ in old[0].kv], after, tokens)
        new.cache.enabled = False
        members, views = [], []
        for instance, pages, table in zip(old, distinct, tables, strict=True):
            members.append(Member(instance.group, instance.pages, instance.kv))
            for sequence in instance.running:
                assert sequence.pages is not None, "it runs"
                members[-1].sequences[sequence] = sequence.pages
                view = SequencePages(new.pages, table[:, pages.columns(sequence.pages)])
                views.append((new, sequence, view))
        transition = self._transition(job, new, members, programs, mover)
        self._hand_over(old, views)
        cluster.replace(old, [new])
        paces = [step_s for instance in old if (step_s := instance.pace.step_s) is not None]
        return Active(job, transition, allocators, old, extra, max(paces, default=None))

    def _begin_down(self, job: Job, instance: Instance) -> Active:
        cluster, geometry = self._cluster, self._cluster.dims.pages
        change = GroupChange.of(cluster, job.options, [instance])
        group, tp, after = instance.group, change.target, change.released[1]
        check_growth(cluster, instance, tp, after)
        allocators = [cluster.new_allocator(after) for _ in group.devices]
        room = [a.num_free(geometry.order(tp)) for a in allocators[::tp]]
        parts = deal(instance.running, room, cluster.buckets(tp).max_num_seqs)
        distinct = [distinct_pages(part, instance.tp) for part in parts]
        rows = max(len(part) for part in parts)
        programs, mover, extra = self._prepare(job, change, rows, samplers([instance]), distinct)
        instance.cache.clear()
        instance.cache.enabled = False
        instance.forget_weights()
        tables = place_down([d.table for d in distinct], [d.references for d in distinct], geometry, allocators)
        members = []
        for index, (part, pages, table) in enumerate(zip(parts, distinct, tables, strict=True)):
            pool = PagePool(geometry, allocators[index * tp : (index + 1) * tp], tp)
            members.append(Member(programs.members[index], pool, [[] for _ in instance.kv]))
            for sequence in part:
                assert sequence.pages is not None, "it runs"
                members[-1].sequences[sequence] = SequencePages(pool, table[:, pages.columns(sequence.pages)])
        transition = self._transition(job, instance, members, programs, mover)
        return Active(job, transition, allocators, [instance], extra, instance.pace.step_s)

    def _prepare(
        self,
        job: Job,
        change: GroupChange,
        rows: int,
        kinds: set[SamplerKind],
        pages: list[DistinctPages],
    ) -> tuple[TransitionPrograms, Mover, int]:
        """Compile what the transition needs, before anything changes. Also returns the bytes that it takes besides.

        Raises `RequestError` where these are over the budget, and `NotCompiledError` for a program that is missing.
        """
        cluster = self._cluster
        start = time.perf_counter()
        cluster.check_compiled(change.group, change.target, change.released[1])
        num_layers = cluster.dims.config.num_layers
        programs = transition_programs(cluster, change, rows, kinds)
        max_pieces = 0
        if rows:
            programs.prepare_steps()
            steps = -(-num_layers // job.options.layers_per_step)
            new_pages = 1 + steps // cluster.dims.page_size
            max_pieces = max(distinct.table.shape[1] for distinct in pages) + rows * new_pages
        mover = make_mover(job.options.variant, programs, cluster.weights)
        extra = mover.prepare(max_pieces)
        try:
            self._reserve(change.group.device_indices, extra)
        except MemoryBudgetError as error:
            raise RequestError(f"variant {job.options.variant}: {error}, or kv_cache_tokens") from error
        job.prepare_s += time.perf_counter() - start
        return programs, mover, extra

    def _reserve(self, devices: Iterable[int], num_bytes: int) -> None:
        """Set aside what a transition takes, or, with none under way, what the memory plan has for it."""
        for device in devices:
            self._cluster.ledgers[device].reserve("staging", max(num_bytes, self._cluster.memory_plan.staging_bytes))

    def _transition(
        self, job: Job, instance: Instance, members: list[Member], programs: TransitionPrograms, mover: Mover
    ) -> Transition:
        return Transition(
            instance,
            members,
            programs,
            mover,
            self._cluster.weights,
            layers_per_step=job.options.layers_per_step,
            overlapped=job.options.variant is TransformVariant.IN_PLACE_OVERLAPPED,
        )

    def _hand_over(self, old: list[Instance], views: list[tuple[Instance, Sequence, SequencePages]]) -> None:
        """Have new instances run the sequences of old ones, with other pages. Where that fails, the old ones do.

        Then sequences with a state on the device, which others have written over, are computed again.
        """
        before = [(sequence, sequence.pages, sequence.slot) for _, sequence, _ in views]
        try:
            for instance, sequence, pages in views:
                sequence.pages = pages
                instance.add(sequence)
        except BaseException:
            for sequence, pages, slot in before:
                sequence.pages, sequence.slot = pages, slot
            for instance in old:
                for sequence in [s for s in instance.running if s.sampling.uses_state]:
                    self._requeue(instance, sequence)
            raise
        for instance in old:
            instance.running.clear()

    # The course of a transition

    def advance(self, instance: Instance, reserve: Callable[[Instance], int]) -> StepPlan | None:
        """Switch the next layers of an instance in transition and launch a step behind them, if anything decodes.

        `reserve` gives the instance's sequences pages for their next tokens, and returns how many it preempted for
        that. Returns the step, if there is one.
        """
        active, plan = self._active[instance], None
        transition = active.transition
        try:
            active.recomputed += reserve(instance)
            transition.switch_layers()
            plan = self._launch(transition)
            if plan is None:
                while not transition.done:
                    transition.switch_layers()
            else:
                active.steps += 1
                active.tokens += len(plan.rows)
            if transition.done:
                self._finish(active)
        except Exception as error:
            self._fail(active, error)
        transition.drop_spent()
        return plan

    def _launch(self, transition: Transition) -> StepPlan | None:
        """Launch the next step, if anything decodes, without sequences that need a program which is missing."""
        while (plan := transition.plan_step()) is not None:
            try:
                transition.instance.launch_plan(plan)
            except StepNotLaunchedError as error:
                self._refuse(transition.instance, plan, error)
            else:
                break
        return plan

    def _finish(self, active: Active) -> None:
        cluster, transition = self._cluster, active.transition
        instance = transition.instance
        if not transition.up:
            self._drain(instance)
            if instance not in self._active:
                return  # a step's results could not be read: see `lost`
        if active.steps and not instance.pending:  # no one else will tell when the last switch is over
            jax.block_until_ready([instance.kv, *(member.kv for member in transition.members)])
        if transition.up:
            instance.transition = None
            instance.cache.enabled = cluster.config.prefix_caching
        else:
            new, views, released = [], [], transition.programs.released[1]
            tokens = disassemble(instance.group, instance.last_tokens)
            for index, member in enumerate(transition.members):
                ranks = slice(index * member.group.tp, (index + 1) * member.group.tp)
                parts = active.allocators[ranks], member.kv, released, tokens[ranks]
                new.append(cluster.new_instance(member.group, *parts))
                views += [(new[-1], sequence, pages) for sequence, pages in member.sequences.items()]
            self._hand_over([instance], views)
            cluster.replace([instance], new)
        for device, allocator in zip(instance.group.device_indices, active.allocators, strict=True):
            cluster.allocators[device] = allocator
        del self._active[instance]
        if transition.up and instance.pending:
            self._settling.append((active, instance.pending[-1].result))
            return
        if transition.restored:
            home = next(i for i in cluster.instances if i.id == instance.id)
            self._settling.append((active, home.when_ready(transition.restored)))
            return
        self._settle(active)

    def wait(self) -> None:
        """Wait for transitions that have switched all layers, and end them."""
        for _, result in self._settling:
            result.exception()
        self.collect()

    def collect(self) -> None:
        """End the transitions whose last step has run."""
        arrived = [settling for settling in self._settling if settling[1].done()]
        self._settling = [settling for settling in self._settling if settling not in arrived]
        for active, result in arrived:
            error = result.exception()
            if error is None:
                self._settle(active)
            else:
                self._fail_settling(active, error)

    def _settle(self, active: Active) -> None:
        self._reserve(active.devices, 0)
        active.job.groups.append(active.report())
        active.job.active -= 1
        self._proceed(active.job)

    # Failures

    def _fail(self, active: Active, error: Exception) -> None:
        """A step or a switch failed: back to what was, or, after the point of no return, on with an empty cache."""
        if active.transition.started:
            self._recover(active)
            how = "its requests are computed again"
        else:
            self._abort(active)
            how = "its instances are as they were"
        self._end_failed(active, error, how)

    def lost(self, instance: Instance, error: Exception, rows: Iterable[Row]) -> None:
        """A step of these rows of an instance in transition failed on its devices: its results cannot be read. The
        group goes on at the higher degree with an empty cache, whether or not a layer has switched: its pages may be
        lost."""
        active = self._active[instance]
        for row in rows:
            row.sequence.num_in_flight = 0
        logger.error("a step failed during a transformation of devices %s", active.devices, exc_info=error)
        self._recover(active)
        self._end_failed(active, error, "its requests are computed again")

    def _fail_settling(self, active: Active, error: BaseException) -> None:
        """What a group was left with cannot be read: its cache, which is made again with its step, or its weights."""
        how = "its requests are computed again"
        if not active.transition.up:
            instances = [i for i in self._cluster.instances if i.id in active.devices]
            for instance in instances:
                self._give_up(instance)
            # What was restored counts as released again, and is loaded.
            programs, weights = active.transition.programs, self._cluster.weights
            for layer in range(programs.num_layers):
                weights.release(programs.group, layer, programs.released[1], programs.released[0])
            self._cluster.take_back(instances)
            how = f"its weights are loaded again, and {how}"
        self._end_failed(active, error, how)

    def _give_up(self, instance: Instance) -> None:
        """Have the sequences of an instance whose cache is lost computed again."""
        for row in (row for step in instance.pending for row in step.sampled):
            row.sequence.num_in_flight = 0  # its token never comes; also if it was preempted a moment ago
        instance.pending.clear()
        instance.cache.clear()
        instance.cache.enabled = False
        for sequence in list(instance.running):
            self._requeue(instance, sequence)

    def _end_failed(self, active: Active, error: BaseException, how: str) -> None:
        drop_frames(error)
        self._reserve(active.devices, 0)
        active.job.fail(error, active.devices, how)
        active.job.active -= 1
        self._proceed(active.job)

    def fail(self, error: BaseException) -> None:
        """The engine fails: so do the transformations under way."""
        for job in self._jobs:
            failure = TransformError(f"the engine failed: {error}")
            failure.__cause__ = error
            job.future.set_exception(failure)
        self._jobs.clear()
        self._active.clear()
        self._settling.clear()

    def _abort(self, active: Active) -> None:
        """Before the point of no return: nothing has moved and no step has run, and the view to come is dropped."""
        transition = active.transition
        instance = transition.instance
        del self._active[instance]
        if not transition.up:
            instance.transition = None
            instance.cache.enabled = self._cluster.config.prefix_caching
            return
        instance.transition = None
        instance.state.replace_lost()  # taking the sequences back writes their rows again
        instance.running.clear()
        old = []
        for before, member in zip(active.old, transition.members, strict=True):
            allocators = [self._cluster.allocators[device] for device in member.group.device_indices]
            old.append(self._cluster.new_instance(member.group, allocators, member.kv, before.released))
            for sequence, pages in member.sequences.items():
                sequence.pages = pages
                old[-1].add(sequence)
        self._cluster.replace([instance], old)

    def _recover(self, active: Active) -> None:
        """After it: the group goes on at the higher degree, and computes its requests again."""
        cluster, transition = self._cluster, active.transition
        instance = transition.instance
        del self._active[instance]
        self._give_up(instance)
        instance.state.replace_lost()
        kv = transition.undo()
        released = max(transition.programs.released)
        allocators = [cluster.new_allocator(released) for _ in instance.group.devices]
        for device, allocator in zip(instance.group.device_indices, allocators, strict=True):
            cluster.allocators[device] = allocator
        cluster.replace([instance], [cluster.new_instance(instance.group, allocators, kv, released)])
