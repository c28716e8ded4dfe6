"""What each instance computes next, and what becomes of steps that cannot be launched."""

import bisect
import math
import time
from collections.abc import Iterable, Iterator

from amoeba_jax.engine.recovery import Recovery
from amoeba_jax.engine.sequences import Sequences
from amoeba_jax.errors import MemoryBudgetError, RequestError
from amoeba_jax.instances.batcher import other_plans, plan_step, roomy_plans
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.lane_batcher import lane_plans
from amoeba_jax.instances.pace import ExpectedStep
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step_plan import Row, StepNotLaunchedError, StepPlan
from amoeba_jax.sampling.rows import SamplerKind
from amoeba_jax.stats import STEP_TOKENS, EngineStats
from amoeba_jax.transform.transformation import Transformations

# The step that computes, and one behind it so that the device need not wait for the host.
MAX_PENDING_STEPS = 2
# That one is launched this long before the other is expected to end: requests that come until then are in it, and an
# urgent one, for which others pause, waits for one step less.
LAUNCH_LEAD_S = 0.015
# One that takes less is followed at once: waking up in the middle of it costs 1% of it (28 ms on 2 cores).
SHORT_STEP_S = 0.04
# Steps of instances that may pause are launched in parts that take at least `PART_S`, each `PART_LEAD_S` before those
# ahead of it are expected to have run: an urgent request waits for these alone, and not for the step.
PART_S, PART_LEAD_S = 0.015, 0.007


class Launching:
    """Launches the next step of an instance. Used by the dispatcher thread only."""

    def __init__(
        self,
        cluster: Cluster,
        sequences: Sequences,
        transformations: Transformations,
        recovery: Recovery,
        stats: EngineStats,
    ):
        self._cluster, self._sequences, self._stats = cluster, sequences, stats
        self._transformations, self._recovery = transformations, recovery

    def due_s(self, instance: Instance) -> float:
        """Seconds until an instance's next step, or part of one, is to be launched; infinite where nothing says when,
        before a result comes."""
        held_s = self._transformations.held_s(instance) if instance.begun is None else 0.0
        return max(held_s, step_due_s(instance))

    def launch(self, instance: Instance) -> bool:
        """Launch an instance's next step, if it has anything to compute; of one that merges or splits, switch layers
        before it. Of a step that was begun, launch the next part. Returns whether anything was done."""
        if instance.begun is not None:
            self._launch_part(instance)
            return True
        if self._transformations.held_s(instance) > 0:
            return False
        num_preempted = self._reserve_next_tokens(instance)
        if instance.transition is None:
            return self._launch_step(instance) is not None
        step = self._plan(instance) if instance.transition.overlaps else None
        if self._transformations.active.switch_layers(instance, num_preempted, step):
            plan = self._launch_step(instance)
            self._transformations.active.step_launched(instance, plan)
        return True

    def _launch_step(self, instance: Instance) -> StepPlan | None:
        """Launch the next step; None if there is nothing to compute. A step that fails is one."""
        while (plan := self._plan(instance)) is not None:
            try:
                if (parts := self._parts(instance, plan)) is None:
                    instance.launch_plan(plan)
                else:
                    instance.begun = instance.launcher.begin(plan, instance.lanes, *parts)
            except StepNotLaunchedError as error:
                if instance.transition is not None and not self._transformations.active.switch_deferred(instance):
                    return None
                self.refuse(instance, plan, error)
                self._reserve_next_tokens(instance)
                continue
            except Exception as error:
                self.failed(instance, error, plan.rows)
                return plan
            if instance.begun is None:
                self._launched(instance, plan)
            else:
                self._launch_part(instance)
            return plan
        return None

    def _parts(self, instance: Instance, plan: StepPlan) -> tuple[int, ExpectedStep] | None:
        """In how many parts a step is launched, and when it is expected to compute; None: all of it at once.

        Long steps of instances that may have to pause are launched in parts, where a spare buffer of hidden states is
        there to serve with meanwhile.
        """
        plans = self._cluster.plan
        if not plans.has_spare_hidden or instance.tp == plans.config.max_tp or plan.logits_of == "all":
            return None
        if instance.transition is not None:
            return None
        now, last = time.perf_counter(), instance.pending[-1] if instance.pending else None
        before = None if last is None else instance.pace.expected(last.launched_at, last.decodes, last.prompt_tokens)
        step = instance.pace.expected(now, plan.decodes, plan.prompt_tokens)
        if step is None or (last is not None and before is None):
            return None
        seconds = step.ends_at - step.begins_at
        begins_at = now if before is None else max(now, before.ends_at)
        num_parts = min(int(seconds / PART_S), len(plans.segments) + 1) if seconds >= SHORT_STEP_S else 1
        return None if num_parts < 2 else (num_parts, ExpectedStep(begins_at, begins_at + seconds))

    def _launch_part(self, instance: Instance, *, to_the_end: bool = False) -> None:
        """Launch the next part of the step that an instance has begun, or all that is left of it."""
        begun = instance.begun
        try:
            plan = instance.launch_part(to_the_end=to_the_end)
        except Exception as error:
            self.failed(instance, error, () if begun is None else begun.left()[0].rows)
            self._cluster.on_result()  # no result will come that changes may wait for
            return
        if plan is not None:
            self._launched(instance, plan)
        elif instance.begun is None:  # all of its sequences have ended
            self._cluster.on_result()  # no result will come that changes may wait for

    def finish_begun(self, instance: Instance) -> None:
        """Launch what is left of a step that an instance has begun, before something else happens to it: where that
        fails, another is in its place. A paused one keeps what it has begun."""
        if instance.begun is not None and instance in self._cluster.instances:
            self._launch_part(instance, to_the_end=True)

    def _launched(self, instance: Instance, plan: StepPlan) -> None:
        """Take note of a step all of which was launched."""
        instance.turns.took(plan.rows)
        self._count(plan)
        for sequence in self._end_prompts(plan):
            self._sequences.cache_pages(instance, sequence)

    def _plan(self, instance: Instance) -> StepPlan | None:
        """The next step whose programs are there: sequences that can do without those of the best one go on.

        Where someone cannot, programs with which any number can are compiled first; those of the best step come
        when nothing else is waited for. Where there is another step than one whose program has failed, it is taken.
        """
        plans, launcher = self._plans(instance), instance.launcher
        best = next(plans, None)
        if best is None or (launcher.can_launch(best) and not launcher.fails(best)):
            return best
        other = next((plan for plan in plans if launcher.can_launch(plan) and not launcher.fails(plan)), None)
        if other is None and launcher.can_launch(best):
            return best  # it tells a request why it cannot be served
        executables = self._cluster.executables
        if instance.transition is not None:
            executables.request(instance.launcher.specs(best))
            return other
        alike = [i for i in self._cluster.instances if i.tp == instance.tp and i.released == instance.released]
        alike = [i for i in alike if i.transition is None]
        if best.logits_of == "all":
            executables.request(spec for i in alike for spec in i.launcher.specs(best))
            return other
        if other is None or len(other.rows) < len(best.rows):
            kinds: set[SamplerKind] = {s.sampling.kind for s in instance.running if s.num_uncomputed_tokens > 0}
            for plan in roomy_plans(instance.running, instance.buckets):
                for kind in sorted(kinds, reverse=True):
                    executables.request(spec for i in alike for spec in i.launcher.specs(plan, kind))
        executables.compile_later(spec for i in alike for spec in i.launcher.specs(best))
        return other

    def _plans(self, instance: Instance) -> Iterator[StepPlan]:
        """The best step, and others for while its programs are compiled."""
        if instance.transition is not None:
            yield from lane_plans(instance.lanes, instance.lane_buckets, instance.turns, instance.last_was_prompt)
            return
        best = plan_step(
            instance.running,
            instance.buckets,
            instance.turns,
            instance.pace,
            prompt_logits_turn=instance.num_launched % 2 == 0,
        )
        if best is not None:
            yield best
            yield from other_plans(instance.running, instance.buckets)

    def _end_prompts(self, plan: StepPlan) -> list[Sequence]:
        """The sequences whose prompt is through with a step that was launched: their siblings may begin."""
        ended = [r.sequence for r in plan.rows if r.start < len(r.sequence.prompt) <= r.start + r.length]
        for sequence in ended:
            self._sequences.siblings.release(sequence)
        return ended

    def refuse(self, instance: Instance, plan: StepPlan, error: StepNotLaunchedError) -> None:
        """End the sequence of a step that could not be prepared which most likely is why, so that the others can go on.

        Sequences differ in the programs that sample them: the last in order of those that need the rarest.
        """
        kinds = ("greedy", "sample", "full")
        sequence = max((row.sequence for row in plan.rows), key=lambda s: (kinds.index(s.sampling.kind), s.order))
        cause = error.__cause__
        if isinstance(cause, MemoryBudgetError):
            cause = RequestError(str(cause))
        self._sequences.reject(sequence, cause if isinstance(cause, Exception) else error)

    def failed(
        self, instance: Instance, error: Exception, rows: Iterable[Row] = (), sampled: Iterable[Row] = ()
    ) -> None:
        """A step failed on its devices: see `Recovery.recover`. A group between two layouts ends at the higher degree.

        Of a paused instance, whose cache another has, that one recovers.
        """
        instance = next((i for i in self._cluster.instances if instance in i.paused), instance)
        if instance.transition is not None:
            self._transformations.active.lost(instance, error, sampled)
        else:
            self._recovery.recover(instance, error, rows, sampled)

    def _count(self, plan: StepPlan) -> None:
        """Add a step that was launched to the totals."""
        stats, tokens = self._stats, 0
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
        for sequence in sorted((s for s in instance.running if s.num_uncomputed_tokens > 0), key=lambda s: s.order):
            while sequence.slot >= 0 and (holders := instance.reserve(sequence, sequence.num_tokens)):
                holder = max(holders, key=lambda s: s.order)
                self._sequences.preempt(self._sequences.home(holder), holder)
                num_preempted += 1
        return num_preempted


def step_due_s(instance: Instance) -> float:
    """Seconds until an instance's next step is to be launched where nothing changes: none where the one that computes
    is short or near its end, or where nothing is known of that; infinite where that one is launched."""
    pending = instance.pending
    if instance.begun is not None:
        return instance.begun.runs_until - PART_LEAD_S - time.perf_counter()
    if len(pending) >= MAX_PENDING_STEPS:
        return math.inf
    if not pending or instance.transition is not None:
        return 0.0
    (step,) = pending
    expected = instance.pace.expected(step.launched_at, step.decodes, step.prompt_tokens)
    if expected is None or expected.ends_at - expected.begins_at < SHORT_STEP_S:
        return 0.0
    return expected.ends_at - LAUNCH_LEAD_S - time.perf_counter()
