"""Takes in what steps have computed, and hands it out."""

import time
from collections.abc import Callable, Iterable

import numpy as np

from amoeba_jax.engine.recovery import Recovery
from amoeba_jax.engine.sequences import Sequences
from amoeba_jax.errors import NotANumberError
from amoeba_jax.instances.instance import Instance
from amoeba_jax.instances.sequence import Entries, Sequence, Update
from amoeba_jax.instances.step import PendingStep, Row
from amoeba_jax.sampling.rows import NO_TOKEN, unpack_logprobs, unpack_result
from amoeba_jax.stats import EngineStats


class Results:
    """The end of a step. Used by the dispatcher thread only.

    Args:
        failed: called with an instance whose step failed, the error, the step's rows, and those that sampled.
        recovery: is told of steps that succeeded.
    """

    def __init__(
        self,
        sequences: Sequences,
        failed: Callable[[Instance, Exception, Iterable[Row], Iterable[Row]], None],
        recovery: Recovery,
        stats: EngineStats,
    ):
        self._sequences, self._failed = sequences, failed
        self._recovery, self._stats = recovery, stats
        self.num_arrived = 0
        """Tokens of preempted sequences that have arrived: these can start again."""

    def take(self, instance: Instance, step: PendingStep) -> None:
        """Hand out the tokens of a step, and end the sequences that are done."""
        try:
            prompt_result = None if step.prompt_result is None else step.prompt_result.result()
            result = unpack_result(step.result.result())
        except Exception as error:
            self._failed(instance, error, step.rows, step.sampled)
            return
        self._recovery.succeeded(step.rows)
        if prompt_result is not None and step.prompt_row is not None:
            self._take_prompt_logprobs(instance, step.prompt_row, prompt_result)
        prompt_tokens = step.prompt_tokens if instance.transition is None else 0
        now = time.perf_counter()
        kind = step.decodes, prompt_tokens, step.beside_decodes
        instance.pace.take(step.launched_at, now, *kind, num_rows=len(step.rows))
        for row in step.sampled:
            sequence = row.sequence
            if sequence.finished:
                continue  # ended after this step was launched
            token = int(result.tokens[row.place])
            if token == NO_TOKEN:
                self._end_without_token(instance, sequence)
                continue
            entries = None
            if sequence.params.logprobs is not None:
                assert result.logprobs is not None, "the step was sampled with them"
                entries = Entries(result.logprobs, row.place, (token,), sequence.params.logprobs)
            sequence.append(token)
            if sequence.slot < 0:
                self.num_arrived += 1
            if sequence.finished:
                self._sequences.remove(sequence)
            self._sequences.report(Update(sequence, (token,), entries, sequence.finished))

    def _end_without_token(self, instance: Instance, sequence: Sequence) -> None:
        """End a sequence whose logits are not numbers. No one is to find its pages, which may have them too.

        As they are, pages may go to others: attention leaves out what a query does not see, and a sequence that gets
        a page writes what it sees of it first.
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

    def _take_prompt_logprobs(self, instance: Instance, row: Row, packed: np.ndarray) -> None:
        """Report the log-probabilities of a chunk of a prompt, without those that were reported before it was preempted
        and computed again."""
        sequence = row.sequence
        logprobs = unpack_logprobs(packed[row.place :])  # rows before it are padding, of one token each
        targets = sequence.prompt[row.start + 1 : row.start + row.length + 1]
        if sequence.finished:
            return
        if np.isnan(logprobs.logprob[: len(targets)]).any():
            self._end_without_token(instance, sequence)
            return
        known = sequence.num_prompt_logprobs - (row.start + 1)
        if not 0 <= known < len(targets):
            return
        sequence.num_prompt_logprobs += len(targets) - known
        entries = Entries(logprobs, known, targets[known:], sequence.params.prompt_logprobs or 0)
        self._sequences.report(Update(sequence, prompt_logprobs=entries))
