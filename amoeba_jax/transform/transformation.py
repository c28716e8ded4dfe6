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
from amoeba_jax.instances.cluster import Cluster, Scratch, drop_frames
from amoeba_jax.instances.giving_up import give_up
from amoeba_jax.instances.hidden_states import HiddenStates
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane import Lane
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import Row, StepPlan
from amoeba_jax.programs.transition_programs import TransitionPrograms
from amoeba_jax.sampling.rows import SamplerKind
from amoeba_jax.transform.job import Active, Job, check_options, next_groups
from amoeba_jax.transform.lanes import LanePages, deal, joined_lane, move_into, settle_references
from amoeba_jax.transform.movers import Mover, make_mover
from amoeba_jax.transform.needs import GroupChange, needed_programs, samplers, transition_programs
from amoeba_jax.transform.options import TransformOptions
from amoeba_jax.transform.pausing import KeptPages, check_paused, forget, pause, resume
from amoeba_jax.transform.report import GroupTransform, TransformReport, TransformVariant
from amoeba_jax.transform.residency import RestoreError, release, restore, wanted
from amoeba_jax.transform.restart import RestartError, check_growth, restart
from amoeba_jax.transform.switch_pace import SwitchPace, SwitchRates
from amoeba_jax.transform.transition import Transition
from kvcache.allocator import OutOfPagesError
from kvcache.pages import PagePool, SequencePages
from kvcache.relayout import place_down, place_up
from sharding.placement import Placement

logger = logging.getLogger(__name__)


class Transformations:
    """Starts, advances and ends transitions of a cluster's instances. Used by the dispatcher thread only.

    Args:
        drain: waits for what an instance has launched, and takes in the results.
        requeue: takes a sequence off its instance, to be computed again.
    """

    def __init__(
        self,
        cluster: Cluster,
        drain: Callable[[Instance], None],
        requeue: Callable[[Instance, Sequence], None],
    ):
        self._cluster, self._drain, self._requeue = cluster, drain, requeue
        self._rates = SwitchRates()
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
        job = next((job for job in list(self._jobs) if instance.id in job.options.devices), None)
        options = job.options if job is not None else further
        if options is None or instance.id not in options.devices:
            return instance.capacity_tokens, instance.tp
        if options.tensor_parallel_size == instance.tp:
            if job is not None and instance.id not in job.residencies:
                return instance.capacity_tokens, instance.tp
            return self._cluster.capacity_tokens(instance.tp, wanted(options)), instance.tp
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
        named = [i for i in self._cluster.instances if i.id in options.devices]
        check_paused(named, options)
        job = Job(options)
        degree = options.tensor_parallel_size
        job.residencies = {i.id for i in named if i.tp == degree and i.released != wanted(options)}
        self._jobs.append(job)
        self._proceed(job)
        return job.future

    # The course of a job

    def _proceed(self, job: Job) -> None:
        """Start whatever transitions of a job can start now; report if there are none left."""
        if job.error is None:
            try:
                while not job.active and job.error is None and (groups := self._next_groups(job)):
                    if self._await_requests(job, groups):
                        return  # until `collect` finds that they have ended
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

    def _next_groups(self, job: Job) -> list[list[Instance]]:
        return next_groups(job.options, self._cluster, job.residencies)

    def retry(self) -> None:
        """Programs have come: go on with jobs that wait for some."""
        self._proceed_with([job for job in self._jobs if job.awaits_programs])

    def _proceed_with(self, jobs: list[Job]) -> None:
        for job in jobs:
            try:
                self._proceed(job)
            except Exception as error:  # it cannot begin, and all is as it was
                job.future.set_exception(error)

    def _begin(self, job: Job, old: list[Instance]) -> None:
        for instance in old:
            if instance.paused and not instance.paused_sequences:
                forget(instance)
        if job.options.running == "pause" and len(old) > 1:
            self._pause(job, old)
            return
        for instance in old:
            self._drain(instance)
        if old[0].tp == job.options.tensor_parallel_size:
            self._change_residency(job, old[0])
            return
        if old[0].paused and not old[0].running:
            self._resume(job, old[0])
            return
        if job.options.variant is TransformVariant.RESTART:
            self._restart(job, old)
            return
        try:
            active = self._begin_up(job, old) if len(old) > 1 else self._begin_down(job, old[0])
        except BaseException:
            for instance in old:
                self._reserve(instance.group.device_indices, 0)
            raise
        self._active[active.transition.instance] = active
        active.transition.instance.transition = active.transition
        job.active += 1

    def _await_requests(self, job: Job, groups: list[list[Instance]]) -> bool:
        """Whether requests run that are waited for. No others start beside them."""
        instances = [instance for old in groups for instance in old]
        job.awaits_requests = job.options.running == "wait" and any(instance.running for instance in instances)
        for lane in [lane for instance in instances for lane in instance.lanes]:
            lane.closed = job.awaits_requests
        return job.awaits_requests

    def _pause(self, job: Job, old: list[Instance]) -> None:
        """Pause the requests of instances, and have one over their devices serve."""
        start = time.perf_counter()
        change, cluster = GroupChange.of(self._cluster, job.options, old), self._cluster
        cluster.check_compiled(change.group, change.group.tp, change.released[1])
        for instance in old:
            if instance.released < change.released[0]:
                self._drain(instance)
                cluster.release_more(instance, change.released[0])
        count = len(pause(cluster, old).paused_sequences)
        degrees = old[0].tp, change.group.tp
        job.groups.append(GroupTransform.without_moves(change.group.device_indices, degrees, start, paused=count))

    def _resume(self, job: Job, instance: Instance) -> None:
        """Have paused requests go on, in the place of an instance that has none."""
        start = time.perf_counter()
        dropped = instance.lane.cache.num_cached_pages
        members = resume(self._cluster, instance)
        job.groups.append(
            GroupTransform.without_moves(
                instance.group.device_indices,
                (instance.tp, members[0].tp),
                start,
                resumed=sum(len(member.running) for member in members),
                prefix_pages_dropped=dropped,
            )
        )

    def _change_residency(self, job: Job, instance: Instance) -> None:
        """Have an instance of the degree asked for release or restore weights."""
        start, degree, devices = time.perf_counter(), wanted(job.options), instance.group.device_indices
        job.residencies.discard(instance.id)
        counts: dict[str, int] = {}
        try:
            if degree > instance.released:
                release(self._cluster, instance, degree)
            else:
                staging, kept, dropped = restore(
                    self._cluster, self._requeue, lambda more: self._reserve(devices, more), instance, degree
                )
                counts = {"staging_bytes": staging, "prefix_pages_kept": kept, "prefix_pages_dropped": dropped}
        except RestoreError as error:
            job.fail(error, devices, "its requests are computed again")
        else:
            degrees = instance.tp, instance.tp
            job.groups.append(GroupTransform.without_moves(devices, degrees, start, **counts))
        finally:
            self._reserve(devices, 0)

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
        parts = [LanePages.of(i.running, i.lane.cache.pages(), i.tp) for i in old]
        programs, mover, extra = self._prepare(job, change, rows, samplers(old), parts)
        if programs.changes_weights:
            cluster.weights.prepare_release(group, before, after)
        allocators = [cluster.new_allocator(after) for _ in group.devices]
        tables = place_up([p.table for p in parts], [p.references for p in parts], geometry, allocators)
        for instance in old:
            if instance.released < before:
                cluster.release_more(instance, before)
        members = [instance.site for instance in old]
        scratch = Scratch.joined([cluster.scratch_of(instance) for instance in old])
        new = cluster.new_instance(group, allocators, [[] for _ in members[0].kv], after, scratch)
        high, pool = new.site, new.lane.pages
        new.lanes, views, limit = [], [], self._lane_limit(parts, change.lower)
        for instance, part, table in zip(old, parts, tables, strict=True):
            low = instance.group.home, instance.lane.pages, part.table
            lane, pages = self._joined_lane(part, low, (group.home, pool, table), limit)
            new.lanes.append(lane)
            views += [(new, lane, sequence, own) for sequence, own in pages]
        homes = [site.group.home for site in members]
        new.runner.sites.update(zip(homes, members, strict=True))
        new.runner.place(Placement.of_layers(group.home, [tuple(homes)] * programs.num_layers))
        paces = [step_s for instance in old if (step_s := instance.pace.step_s) is not None]
        step_s = max(paces, default=None)
        transition = Transition(
            new, high, members, programs, mover, cluster.weights, self._pace(job, step_s, up=True),
            overlapped=job.overlapped,
        )  # fmt: skip
        new.lane_buckets = cluster.buckets(change.lower)
        self._hand_over(old, views)
        cluster.replace(old, [new])
        cached = sum(len(part.cached) for part in parts)
        return Active(job, transition, allocators, old, extra, step_s, None, cached, cached)

    def _begin_down(self, job: Job, instance: Instance) -> Active:
        cluster, geometry = self._cluster, self._cluster.dims.pages
        change = GroupChange.of(cluster, job.options, [instance])
        group, tp, after = instance.group, change.target, change.released[1]
        check_growth(cluster, instance, tp, after)
        allocators = [cluster.new_allocator(after) for _ in group.devices]
        kept = KeptPages(instance, allocators)
        room = [a.num_free(geometry.order(tp)) for a in allocators[::tp]]
        old_lane = instance.lane
        busy = max((len(member.running) for member in instance.paused), default=0)
        parts = deal(old_lane, room, cluster.buckets(tp).max_num_seqs - busy)
        rows = max(len(part.sequences) for part in parts)
        programs, mover, extra = self._prepare(job, change, rows, samplers([instance]), parts)
        tables = place_down([p.table for p in parts], [p.references for p in parts], geometry, allocators)
        settle_references(old_lane.pages, old_lane.cache.pages(), parts)
        num_layers, members, lanes, limit = programs.num_layers, [], [], self._lane_limit(parts, tp) - busy
        for index, (part, table) in enumerate(zip(parts, tables, strict=True)):
            member = programs.members[index]
            members.append(cluster.new_site(member, [[] for _ in range(num_layers)], after))
            pool = PagePool(geometry, allocators[index * tp : (index + 1) * tp], tp)
            high = group.home, old_lane.pages, part.table
            lane, pages = self._joined_lane(part, (member.home, pool, table), high, limit)
            for sequence, own in pages:
                sequence.pages = own
                lane.running.append(sequence)
            lanes.append(lane)
        instance.lanes, instance.lane_buckets = lanes, cluster.buckets(tp)
        instance.runner.sites.update((site.group.home, site) for site in members)
        instance.runner.place(Placement.uniform(group.home, num_layers, len(lanes)))
        transition = Transition(
            instance, instance.site, members, programs, mover, cluster.weights,
            self._pace(job, instance.pace.step_s, up=False), overlapped=job.overlapped,
        )  # fmt: skip
        cached = old_lane.cache.num_cached_pages, len({page.key for part in parts for page in part.cached})
        return Active(job, transition, allocators, [instance], extra, instance.pace.step_s, kept, *cached)

    def _pace(self, job: Job, step_s: float | None, *, up: bool) -> SwitchPace:
        return SwitchPace(job.options.layers_per_step, step_s, self._rates, up=up)

    def _joined_lane(self, part: LanePages, low: Any, high: Any, max_running: int):
        enabled = self._cluster.config.prefix_caching
        return joined_lane(part, low, high, enabled=enabled, max_running=max_running)

    def _lane_limit(self, parts: list[LanePages], tp: int) -> int:
        """Sequences that a lane may run: none where there are no pages, as then all layers switch at once, with nothing
        to move."""
        return self._cluster.buckets(tp).max_num_seqs if any(part.num_pages for part in parts) else 0

    def _prepare(
        self,
        job: Job,
        change: GroupChange,
        rows: int,
        kinds: set[SamplerKind],
        pages: list[LanePages],
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
            programs.prepare_steps(prompts=any(s.num_left > 1 for part in pages for s in part.sequences))
        if any(part.num_pages for part in pages):
            per_step = job.options.layers_per_step
            steps = num_layers if per_step == "auto" else -(-num_layers // per_step)
            new_pages = cluster.buckets(change.lower).max_num_seqs * (1 + steps // cluster.dims.page_size)
            max_pieces = max(part.num_pages for part in pages) + new_pages
        devices = change.group.device_indices
        mover = make_mover(job.options.variant, programs, cluster.weights, lambda more: self._reserve(devices, more))
        extra = mover.prepare(max_pieces)
        try:
            self._reserve(devices, extra)
        except MemoryBudgetError as error:
            raise RequestError(f"variant {job.options.variant}: {error}, or kv_cache_tokens") from error
        job.prepare_s += time.perf_counter() - start
        return programs, mover, extra

    def _reserve(self, devices: Iterable[int], num_bytes: int) -> None:
        """Set aside what a transition takes, or, with none under way, what the memory plan has for it."""
        for device in devices:
            self._cluster.ledgers[device].reserve("staging", max(num_bytes, self._cluster.memory_plan.staging_bytes))

    def _hand_over(self, old: list[Instance], views: list[tuple[Instance, Lane, Sequence, SequencePages]]) -> None:
        """Have new instances run the sequences of old ones, with other pages. Where that fails, the old ones do.

        Then sequences with a state on the device, which others have written over, are computed again.
        """
        before = [(sequence, sequence.pages, sequence.slot) for _, _, sequence, _ in views]
        try:
            for instance, lane, sequence, pages in views:
                sequence.pages = pages
                instance.add(sequence, lane)
        except BaseException:
            for sequence, pages, slot in before:
                sequence.pages, sequence.slot = pages, slot
            for instance in old:
                for sequence in [s for s in instance.running if s.sampling.uses_state]:
                    self._requeue(instance, sequence)
            raise
        for instance in old:
            for lane in instance.lanes:
                lane.running = []

    # The course of a transition

    def switch_layers(self, instance: Instance, num_preempted: int) -> bool:
        """Launch the switch of the next layers of an instance in transition, before its next step.

        `num_preempted` of its sequences have just lost their pages, for want of room. Returns whether it is still in
        transition: False where the switch failed.
        """
        active = self._active[instance]
        active.recomputed += num_preempted
        try:
            active.transition.switch_layers()
        except Exception as error:
            self._fail(active, error)
            active.transition.drop_spent()
            return False
        return True

    def step_launched(self, instance: Instance, plan: StepPlan | None) -> None:
        """A step was launched behind the switch, or there was nothing to compute: then all layers switch at once."""
        if (active := self._active.get(instance)) is None:
            return  # the step failed, and the transition with it
        transition = active.transition
        try:
            if plan is None:
                while not transition.done:
                    transition.switch_layers()
            else:
                active.steps += 1
                active.tokens += len(instance.pending[-1].sampled)
            transition.pace.behind_step = 0
            if transition.done:
                self._finish(active)
        except Exception as error:
            self._fail(active, error)
        transition.drop_spent()

    def _finish(self, active: Active) -> None:
        cluster, transition = self._cluster, active.transition
        instance, group = transition.instance, transition.instance.group
        if not transition.up:
            self._drain(instance)
            if instance not in self._active:
                return  # a step's results could not be read: see `lost`
        if active.steps and not instance.pending:  # no one else will tell when the last switch is over
            jax.block_until_ready([transition.high.kv, *(site.kv for site in transition.members)])
        if transition.up:
            allocators = cluster.settle_allocators(group, active.allocators)
            self._settle_high(instance, PagePool(cluster.dims.pages, allocators, group.tp))
        else:
            self._settle_low(active)
        del self._active[instance]
        if transition.up and instance.pending:
            self._settling.append((active, instance.pending[-1].result))
            return
        if transition.restored:
            home = next(i for i in cluster.instances if i.id == instance.id)
            self._settling.append((active, home.when_ready(transition.restored)))
            return
        self._settle(active)

    def _settle_high(self, instance: Instance, pool: PagePool) -> None:
        """Have an instance of the higher degree be as in steady state, with the pages that its lanes have there."""
        home = instance.group.home
        lane = self._cluster.new_lane(pool, instance.group)
        for sequence, own in move_into(lane, instance.lanes, home):
            sequence.pages = own
            lane.running.append(sequence)
        instance.lanes, instance.lane_buckets, instance.transition = [lane], instance.buckets, None
        instance.runner.sites = {home: instance.site}
        instance.runner.place(Placement.uniform(home, self._cluster.dims.config.num_layers))
        if instance.paused:
            instance.take_the_place_of(instance.paused)

    def _settle_low(self, active: Active) -> None:
        """Have instances of the lower degree, those that were paused if there are, take over what they have there."""
        cluster, transition, instance = self._cluster, active.transition, active.transition.instance
        tp, released = transition.programs.lower, transition.programs.released[1]
        scratch = cluster.scratch_of(instance).split(tp)
        before = [allocator.alias() for allocator in cluster.allocators_of(instance.group)]
        if active.kept is not None:
            active.kept.settle()
        allocators = cluster.settle_allocators(instance.group, active.allocators)
        try:
            new, views = list(instance.paused), []
            for index, (site, lane) in enumerate(zip(transition.members, instance.lanes, strict=True)):
                ranks = slice(index * tp, (index + 1) * tp)
                if not instance.paused:
                    new.append(cluster.new_instance(site.group, allocators[ranks], site.kv, released, scratch[index]))
                home = new[index]
                views += [(home, home.lane, *own) for own in move_into(home.lane, [lane], site.group.home)]
            self._hand_over([instance], views)
        except BaseException:
            cluster.settle_allocators(instance.group, before)
            raise
        for member, site, part in zip(instance.drop_paused(), transition.members, scratch, strict=False):
            member.site.kv[:] = site.kv
            member.runner.hidden = HiddenStates(member.group, part.hidden)
        cluster.replace([instance], new)

    def wait(self) -> None:
        """Wait for transitions that have switched all layers, and end them."""
        for _, result in self._settling:
            result.exception()
        self.collect()

    def collect(self) -> None:
        """End the transitions whose last step has run, and begin those whose requests have ended."""
        self._proceed_with([job for job in self._jobs if job.awaits_requests])
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
                give_up(instance, self._requeue)
            # What was restored counts as released again, and is loaded.
            programs, weights = active.transition.programs, self._cluster.weights
            for layer in range(programs.num_layers):
                weights.release(programs.group, layer, programs.released[1], programs.released[0])
            self._cluster.take_back(instances)
            how = f"its weights are loaded again, and {how}"
        self._end_failed(active, error, how)

    def _end_failed(self, active: Active, error: BaseException, how: str) -> None:
        drop_frames(error)
        for site in (active.transition.high, *active.transition.members):
            site.forget_weights()  # those that were replaced by then live as long as views of them
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
        """Before the point of no return: nothing has moved and no step has run, and the layout to come is dropped."""
        cluster, transition = self._cluster, active.transition
        instance = transition.instance
        del self._active[instance]
        if not transition.up:
            allocators = cluster.allocators_of(instance.group)
            self._settle_high(instance, PagePool(cluster.dims.pages, allocators, instance.tp))
            return
        instance.transition = None
        instance.sampler.state.replace_lost()  # taking the sequences back writes their rows again
        scratch = cluster.scratch_of(instance).split(transition.programs.lower)
        old, views = [], []
        for index, (before, site, lane) in enumerate(zip(active.old, transition.members, instance.lanes, strict=True)):
            allocators = cluster.allocators_of(site.group)
            old.append(cluster.new_instance(site.group, allocators, site.kv, before.released, scratch[index]))
            views += [(old[-1], old[-1].lane, *own) for own in move_into(old[-1].lane, [lane], site.group.home)]
        for lane in instance.lanes:
            lane.running = []
        for new, lane, sequence, pages in views:
            sequence.pages = pages
            new.add(sequence, lane)
        cluster.replace([instance], old)

    def _recover(self, active: Active) -> None:
        """After it: the group goes on at the higher degree, and computes its requests again."""
        cluster, transition = self._cluster, active.transition
        instance = transition.instance
        del self._active[instance]
        give_up(instance, self._requeue)
        instance.sampler.state.replace_lost()
        kv = transition.undo()
        released = max(transition.programs.released)
        empty = [cluster.new_allocator(released) for _ in instance.group.devices]
        allocators = cluster.settle_allocators(instance.group, empty)
        new = cluster.new_instance(instance.group, allocators, kv, released, cluster.scratch_of(instance))
        cluster.replace([instance], [new])
