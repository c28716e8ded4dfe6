"""What each instance computes next, and what becomes of steps that cannot be launched."""

import bisect
from collections.abc import Iterable, Iterator

from amoeba_jax.engine.recovery import Recovery
from amoeba_jax.engine.sequences import Sequences
from amoeba_jax.errors import MemoryBudgetError, RequestError
from amoeba_jax.instances.batcher import lane_plans, other_plans, plan_step, roomy_plans
from amoeba_jax.instances.cluster import Cluster
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Sequence
from amoeba_jax.instances.step import Row, StepNotLaunchedError, StepPlan
from amoeba_jax.sampling.rows import SamplerKind
from amoeba_jax.stats import STEP_TOKENS, EngineStats
from amoeba_jax.transform.transformations import Transformations

# The step that computes, and one behind it so that the device need not wait for the host.
MAX_PENDING_STEPS = 2


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

    def launch(self, instance: Instance) -> bool:
        """Launch the next step of an instance. If the instance merges or splits, switch layers before it.

        Returns whether anything was done: not if `MAX_PENDING_STEPS` are in flight, nor without anything to compute.
        """
        if len(instance.pending) >= MAX_PENDING_STEPS or self._transformations.holds(instance):
            return False
        num_preempted = self._reserve_next_tokens(instance)
        if instance.transition is None:
            return self._launch_step(instance) is not None
        step = self._plan(instance) if instance.transition.overlaps else None
        if self._transformations.switch_layers(instance, num_preempted, step):
            plan = self._launch_step(instance)
            self._transformations.step_launched(instance, plan)
        return True

    def _launch_step(self, instance: Instance) -> StepPlan | None:
        """Launch the next step; None if there is nothing to compute. A step that fails is one."""
        while (plan := self._plan(instance)) is not None:
            try:
                instance.launch_plan(plan)
            except StepNotLaunchedError as error:
                if instance.transition is not None and not self._transformations.switch_alone(instance):
                    return None
                self.refuse(instance, plan, error)
                self._reserve_next_tokens(instance)
                continue
            except Exception as error:
                self.failed(instance, error, plan.rows)
                return plan
            instance.turns.took(plan.rows)
            self._count(plan)
            for sequence in self._end_prompts(plan):
                self._sequences.cache_pages(instance, sequence)
            return plan
        return None

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
        if len(instance.lanes) > 1:
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
        if len(instance.lanes) > 1:
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
            self._transformations.lost(instance, error, sampled)
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
