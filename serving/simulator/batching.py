"""Which chunks of prompts a step takes beside its decodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Batching(Protocol):
    """Chooses prompt chunks. Decodes never wait: a step has one token of every sequence that decodes."""

    def chunks(self, left: Sequence[int], decodes: int, degree: int) -> list[int]:
        """Tokens taken of the first prompts, in order, of those that have `left` tokens to compute, beside that many
        decodes of an instance of that degree."""
        ...


@dataclass(frozen=True)
class TokenBudget:
    """Prompts in order, up to a number of tokens a step, as vLLM's chunked prefill has it."""

    max_num_batched_tokens: int = 2048

    def chunks(self, left: Sequence[int], decodes: int, degree: int) -> list[int]:
        """See `Batching.chunks`. The budget is for prompts alone."""
        budget, taken = self.max_num_batched_tokens, []
        for tokens in left:
            if budget <= 0:
                break
            taken.append(min(tokens, budget))
            budget -= taken[-1]
        return taken


_COARSE, _MIN_CHUNK = 4, 16


@dataclass(frozen=True)
class EngineBuckets:
    """Prompts as amoeba-jax's own engine batches them for its compiled shapes (`amoeba_jax.programs.buckets`): one
    chunk size a step, set by the first prompt, and 1 or 4 prompts of that size. Each device of an instance brings
    `max_num_seqs` sequences."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512

    def chunks(self, left: Sequence[int], decodes: int, degree: int) -> list[int]:
        """See `Batching.chunks`."""
        chunk = self.chunk_size(left[0])
        taken = self.most_prompts(decodes, len(left), chunk, degree)
        return [min(tokens, chunk) for tokens in left[:taken]]

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Tokens of prompt chunks, ascending: the budget, a quarter of it, and so on."""
        sizes = [self.max_num_batched_tokens]
        while sizes[0] >= _COARSE * _MIN_CHUNK:
            sizes.insert(0, sizes[0] // _COARSE)
        return tuple(sizes)

    def chunk_size(self, length: int) -> int:
        """For a prompt with `length` tokens left: the smallest that holds them, or the next smaller if they would not
        fill half of it."""
        sizes = self.chunk_sizes
        index = next((index for index, size in enumerate(sizes) if size >= length), len(sizes) - 1)
        return sizes[index - 1] if index and length * 2 <= sizes[index] else sizes[index]

    def most_prompts(self, decodes: int, waiting: int, chunk: int, degree: int) -> int:
        """Prompts of one step: four, where three or more wait and there is room, or one."""
        most = self.max_num_seqs * degree
        several = _COARSE * chunk <= self.max_num_batched_tokens and most >= _COARSE
        if several and waiting + 1 >= _COARSE and decodes + _COARSE <= most:
            return min(waiting, _COARSE)
        return 1
