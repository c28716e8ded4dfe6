"""Life of a step: plan the step, launch the step, take the results, and recover the instance if the step fails.

A step is one pass of some sequences through the model. Programs that compute layers take the KV cache as a donated
argument, and return the KV cache. If such a program fails, for example for lack of memory, the donated buffers are
lost. The instance then gets new, empty buffers. A failure cannot lose weights, because steps never donate weights.
"""

import bisect
import logging
import time
from collections.abc import Iterable, Iterator

import numpy as np

from amoeba_jax.engine.sequences import Sequences
from amoeba_jax.errors import MemoryBudgetError, NotANumberError, RequestError, RequestFailedError
from amoeba_jax.instances.batcher import lane_plans, other_plans, plan_step, roomy_plans
from amoeba_jax.instances.cluster import Cluster, drop_frames
from amoeba_jax.instances.instance import Instance, Phase
from amoeba_jax.instances.sequence import Entries, Sequence, Update
from amoeba_jax.instances.step import PendingStep, Row, StepNotLaunchedError, StepPlan, clear_in_flight
from amoeba_jax.sampling.rows import (
    NO_ALLOWED_TOKEN,
    NO_TOKEN,
    SamplerKind,
    unpack_logprobs,
    unpack_result,
)
from amoeba_jax.stats import STEP_TOKENS, EngineStats
from amoeba_jax.transform.changes import Changes

logger = logging.getLogger(__name__)

MAX_PENDING_STEPS = 2
"""Maximum number of steps in flight on one instance. With two steps, the device need not wait for the host."""
MAX_FAILURES = 3
"""Number of failed steps of a sequence, in a row, after which the sequence ends with an error."""
MAX_FAILURES_IN_A_ROW = 16
"""Maximum number of failed steps in a row, counted over all instances. The next failure ends the engine."""


class Steps:
    """Methods that plan and launch steps, take their results, and handle failures. Used by the dispatcher thread only.

    One `Steps` object serves all instances of an engine.
    """

    def __init__(
        self,
        cluster: Cluster,
        sequences: Sequences,
        changes: Changes,
        stats: EngineStats,
    ):
        self._cluster, self._sequences = cluster, sequences
        self._changes, self._stats = changes, stats
        self._failures_in_a_row = 0

    # Launch

    def launch(self, instance: Instance) -> bool:
        """Launch the next step of an instance. If the instance is in a transition, first switch the next layers.

        Nothing is launched, and the result is False, in these cases:

        - `MAX_PENDING_STEPS` steps of the instance are in flight.
        - The instance is draining. Its steps in flight must end first.
        - No step can be launched now (`_plan`), and the instance is not in a transition.

        In all other cases, the result is True, even if a program fails during the launch.
        """
        changes, transition = self._changes, instance.transition
        if len(instance.pending) >= MAX_PENDING_STEPS or instance.phase is Phase.DRAINING:
            return False
        num_preempted = self._reserve_next_tokens(instance)
        if transition is not None:
            step = self._plan(instance) if transition.overlaps else None
            if not changes.switch_layers(instance, num_preempted, step):
                return True  # the switch failed
        while (plan := self._plan(instance)) is not None:
            try:
                step = instance.runner.launch(plan, instance.lanes)
            except StepNotLaunchedError as error:
                # If the switch was to run inside this step, launch the switch alone.
                if instance.transition is not None and not changes.switch_alone(instance):
                    plan = None
                    break
                self._reject_one(plan, error)
                self._reserve_next_tokens(instance)
                continue
            except Exception as error:
                self.recover(instance, error, plan.rows)
            else:
                self._launched(instance, plan, step)
            break
        if transition is not None:
            changes.step_launched(instance, plan)
        return transition is not None or plan is not None

    def _reserve_next_tokens(self, instance: Instance) -> int:
        """Reserve pages for the next tokens of all running sequences. Return the number of preempted sequences.

        If too few pages are free, preempt sequences. The sequence that is last in `Sequence.order` is preempted first.
        """
        num_preempted = 0
        for sequence in sorted((s for s in instance.running if s.num_uncomputed_tokens > 0), key=lambda s: s.order):
            while sequence.slot >= 0 and (holders := instance.reserve(sequence, sequence.num_tokens)):
                last = max(holders, key=lambda s: s.order)
                self._sequences.preempt(self._cluster.instance_of(last), last)
                num_preempted += 1
        return num_preempted

    def _plan(self, instance: Instance) -> StepPlan | None:
        """Return the next step to launch. Return None if no step can be launched now.

        `_plans` yields the possible steps, the best step first. The first case that applies determines the result:

        1. All programs of the best step are compiled. Return the best step.
        2. All programs of another possible step are compiled. Return the first such step.
        3. No program of the best step is missing, but one has failed to compile (`Runner.fails`). Return the best
           step. The launch of this step then raises the error.
        4. Otherwise, return None.

        If the result is not the best step, the missing programs of the best step are compiled in the background.
        """
        plans, runner = self._plans(instance), instance.runner
        best = next(plans, None)
        if best is None or (runner.can_launch(best) and not runner.fails(best)):
            return best
        other = next((plan for plan in plans if runner.can_launch(plan) and not runner.fails(plan)), None)
        if other is None and runner.can_launch(best):
            return best  # the launch raises the error of the failed program, and then one request is rejected
        self._request_programs(instance, best, other)
        return other

    def _plans(self, instance: Instance) -> Iterator[StepPlan]:
        """Yield the best step, then other steps that can be launched if programs of the best step are missing."""
        has_turn = instance.num_launched % 2 == 0
        if len(instance.lanes) > 1:
            yield from lane_plans(instance.lanes, instance.lane_buckets, instance.turns, prompt_turn=has_turn)
            return
        running, buckets = instance.running, instance.buckets
        best = plan_step(running, buckets, instance.turns, instance.pace, prompt_logits_turn=has_turn)
        if best is not None:
            yield best
            yield from other_plans(running, buckets)

    def _request_programs(self, instance: Instance, best: StepPlan, other: StepPlan | None) -> None:
        """Start to compile the missing programs of the best step in the background.

        If `instance` has several lanes or homes, the programs are compiled only for `instance`. Otherwise, the programs
        are compiled for all instances that have the degree and the released degree of `instance`, except instances in a
        transition.

        If `other` is None or has fewer sequences than `best`, some sequences must wait. In that case, programs of steps
        with room for as many sequences as possible (`roomy_plans`) are compiled first, and then the programs of `best`.
        But if `instance` has several lanes, or if `best` computes log-probabilities of a prompt, only the programs of
        `best` are compiled.

        Args:
            instance: instance that runs the steps.
            best: best step. Some of its programs are missing.
            other: step that the instance launches instead of `best`. None: the instance launches no step now.
        """
        executables = self._cluster.executables
        if len(instance.lanes) > 1:
            executables.request(instance.runner.specs(best))
            return
        peers = [i for i in self._cluster.instances if i.tp == instance.tp and i.released == instance.released]
        peers = [instance] if instance.is_spread else [i for i in peers if i.transition is None and not i.is_spread]
        runners = [peer.runner for peer in peers]
        if best.logits_of == "all":
            executables.request(spec for runner in runners for spec in runner.specs(best))
            return
        if other is None or len(other.rows) < len(best.rows):
            kinds: set[SamplerKind] = {s.sampling.kind for s in instance.running if s.num_uncomputed_tokens > 0}
            for plan in roomy_plans(instance.running, instance.buckets):
                for kind in sorted(kinds, reverse=True):
                    executables.request(spec for runner in runners for spec in runner.specs(plan, kind))
        executables.compile_later(spec for runner in runners for spec in runner.specs(best))

    def _launched(self, instance: Instance, plan: StepPlan, step: PendingStep) -> None:
        """Record a launched step.

        If the step completes the prompt of a sequence, add the prompt pages to the prefix cache, and let the siblings
        of the sequence enter the queue (`Sequences.release_siblings`).
        """
        if instance.transition is not None:
            step.decodes = False
        instance.pending.append(step)
        instance.num_launched += 1
        instance.turns.took(plan.rows)
        stats = self._stats
        stats.steps += 1
        stats.steps_by_tokens[bisect.bisect_left(STEP_TOKENS, sum(row.length for row in plan.rows))] += 1
        for row in plan.rows:
            num_prompt = len(row.sequence.prompt)
            if row.start < num_prompt or row.length > 1:
                stats.prompt_tokens += row.length
            else:
                stats.decode_tokens += 1
            if row.start < num_prompt <= row.start + row.length:
                self._sequences.release_siblings(row.sequence)
                self._sequences.cache_pages(instance, row.sequence)

    def _reject_one(self, plan: StepPlan, error: StepNotLaunchedError) -> None:
        """Reject the sequence that most likely prevents the launch of a step. The other sequences can then continue.

        All sequences of a step share their programs, except the programs that sample. A sequence with the sampler kind
        `full` is therefore the most likely cause, then a sequence with `sample`, then a sequence with `greedy`. Among
        sequences of equal sampler kind, the last in `Sequence.order` is rejected.
        """
        kinds = ("greedy", "sample", "full")
        sequence = max((row.sequence for row in plan.rows), key=lambda s: (kinds.index(s.sampling.kind), s.order))
        cause = error.__cause__
        if isinstance(cause, MemoryBudgetError):
            cause = RequestError(str(cause))
        self._sequences.reject(sequence, cause if isinstance(cause, Exception) else error)

    # Results

    def take(self, instance: Instance, step: PendingStep) -> None:
        """Wait for the results of a step, report the new tokens, and end sequences that are complete.

        If the sampling of the next step waits for these tokens, launch this sampling now. If `step` has failed, recover
        the instance.
        """
        try:
            prompt_result = None if step.prompt_result is None else step.prompt_result.result()
            result = unpack_result(step.result.result())
        except Exception as error:
            self.recover(instance, error, step.rows, step.sampled)
            return
        self._failures_in_a_row = 0
        for row in step.rows:
            row.sequence.num_failures = 0
        if prompt_result is not None and step.prompt_row is not None:
            self._report_prompt_logprobs(instance, step.prompt_row, prompt_result)
        prompt_tokens = step.prompt_tokens if instance.transition is None else 0
        kind = step.decodes, prompt_tokens, step.beside_decodes
        instance.pace.take(step.launched_at, time.perf_counter(), *kind, num_rows=len(step.rows))
        for row in step.sampled:
            sequence = row.sequence
            if sequence.finished:
                continue  # the sequence ended after the launch of this step
            token = int(result.tokens[row.place])
            if token == NO_TOKEN:
                self._reject_nan(instance, sequence)
                continue
            if token == NO_ALLOWED_TOKEN:
                self._reject_no_token(sequence)
                continue
            entries = None
            if sequence.params.logprobs is not None:
                assert result.logprobs is not None, "the sampler returns them if a row of the step asks for them"
                entries = Entries(result.logprobs, row.place, (token,), sequence.params.logprobs)
            sequence.append(token)
            if sequence.slot < 0:
                self._sequences.num_changes += 1  # a preempted sequence can start again: its last token is known
            if sequence.finished:
                self._sequences.remove(sequence)
            self._sequences.report(Update(sequence, (token,), entries, sequence.finished))
        self._sample_late(instance)

    def _sample_late(self, instance: Instance) -> None:
        """Launch the sampling of the oldest step in flight. Do nothing if this sampling is already launched.

        With structured output, the allowed tokens depend on the previous token. The sampling therefore waits until the
        host knows the previous token.
        """
        step = next(iter(instance.pending), None)
        if step is None or step.logits is None:
            return
        if any(row.sequence.slot < 0 for row in step.sampled):
            self._sequences.num_changes += 1  # a preempted sequence may start again without this sample
        try:
            instance.runner.sample_late(step)
        except Exception as error:
            self.recover(instance, error, step.rows, step.sampled)

    def _report_prompt_logprobs(self, instance: Instance, row: Row, packed: np.ndarray) -> None:
        """Report the log-probabilities of one chunk of a prompt.

        After a preemption, the prompt is computed again. Log-probabilities that were already reported are left out.

        Args:
            instance: instance that computed the chunk.
            row: row of the chunk in its step.
            packed: log-probabilities of all tokens of the step, as the program returns them (`unpack_logprobs`).
        """
        sequence = row.sequence
        logprobs = unpack_logprobs(packed[row.place :])  # earlier rows are padding, with one token each
        targets = sequence.prompt[row.start + 1 : row.start + row.length + 1]
        if sequence.finished:
            return
        if np.isnan(logprobs.logprob[: len(targets)]).any():
            self._reject_nan(instance, sequence)
            return
        known = sequence.num_prompt_logprobs - (row.start + 1)
        if not 0 <= known < len(targets):
            return
        sequence.num_prompt_logprobs += len(targets) - known
        entries = Entries(logprobs, known, targets[known:], sequence.params.prompt_logprobs or 0)
        self._sequences.report(Update(sequence, prompt_logprobs=entries))

    def _reject_nan(self, instance: Instance, sequence: Sequence) -> None:
        """Reject a sequence whose logits are infinite or not numbers, and remove its pages from the prefix cache.

        The freed pages need no zeroing, because a sequence writes each position of a page before reading the position.
        """
        self._stats.nan_logits += 1
        self._sequences.reject(
            sequence,
            NotANumberError(
                f"the model's logits for request {sequence.request_id!r} after {sequence.num_known} tokens are "
                "infinite or not numbers: its weights may be damaged, or values overflow, which they do less in "
                "float32 or bfloat16"
            ),
        )
        if sequence.page_keys is not None:
            for lane in instance.lanes:
                lane.cache.forget(sequence.page_keys.keys)

    def _reject_no_token(self, sequence: Sequence) -> None:
        self._sequences.reject(
            sequence,
            RequestError(
                f"structured output leaves no token to generate after {len(sequence.output)} tokens, together with "
                "allowed_token_ids, bad_words and min_tokens"
            ),
        )

    # Failures

    def recover(
        self, instance: Instance, error: Exception, rows: Iterable[Row] = (), sampled: Iterable[Row] = ()
    ) -> None:
        """Requeue all sequences of an instance after a program has failed, and give the instance an empty KV cache.

        If the instance is merging or splitting, its devices continue as one instance of the higher degree. If the
        instance is paused, recover the merged instance that serves on its devices. Instances that share buffers with
        the recovered instance are recovered too.

        Args:
            instance: instance whose program failed.
            error: error of the program.
            rows: rows of the failed step. The sequence of each row could be the cause of the failure. If `MAX_FAILURES`
                steps of a sequence have failed in a row, the sequence ends with an error.
            sampled: rows of the failed step that were to sample a token. These tokens are lost.

        Raises `error` if more than `MAX_FAILURES_IN_A_ROW` steps have failed in a row. The devices are then assumed to
        be broken.
        """
        instance = next((i for i in self._cluster.instances if instance in i.paused), instance)
        if instance.transition is not None and instance.transition.changes_degree:
            self._changes.lost(instance, error, sampled)
            return
        self._failures_in_a_row += 1
        self._stats.failed_steps += 1
        if self._failures_in_a_row > MAX_FAILURES_IN_A_ROW:
            raise error
        logger.error("a step of instance %d failed; its requests are computed again", instance.id, exc_info=error)
        drop_frames(error)
        involved = list(dict.fromkeys(row.sequence for row in rows))
        clear_in_flight(sampled)
        self._rebuild(self._cluster.sharing(instance))
        for sequence in involved:
            if sequence.finished:
                continue
            sequence.num_failures += 1
            if sequence.num_failures >= MAX_FAILURES:
                failure = RequestFailedError(
                    f"request {sequence.request_id}: {sequence.num_failures} of its steps failed in a row: {error}"
                )
                failure.__cause__ = error
                self._sequences.reject(sequence, failure)

    def _rebuild(self, instances: list[Instance]) -> None:
        """Requeue all sequences of `instances`, and replace these instances by new instances with empty KV caches.

        If another instance shares buffers with one of `instances`, the other instance must be in `instances` too. If
        the new KV caches cannot be allocated, `Cluster.take_back` tries again, or takes the devices out of service.
        """
        for instance in instances:
            instance.requeue_all(self._sequences.preempt)
        for instance in instances:
            self._changes.forget(instance)
        try:
            self._cluster.rebuild(instances)
            return
        except Exception:
            logger.exception("the cache of instances %s cannot be made again", [each.id for each in instances])
        self._cluster.take_back(instances)  # not in the handler, because the frames of the error may hold memory
