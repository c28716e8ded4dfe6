"""Choice of the prompt chunks that a step computes beside its decodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Batching(Protocol):
    """Rule that chooses prompt chunks. Decodes never wait: each step has one token of every decoding sequence."""

    def chunks(self, left: Sequence[int], decodes: int, degree: int) -> list[int]:
        """Return the tokens that one step computes of each prompt, beginning with the first.

        Args:
            left: tokens of each prompt that are not computed yet.
            decodes: decoding sequences in the same step.
            degree: degree of the instance.
        """
        ...


@dataclass(frozen=True)
class TokenBudget:
    """Rule of vLLM's chunked prefill: prompts in order, up to a number of tokens in each step."""

    max_num_batched_tokens: int = 2048

    def chunks(self, left: Sequence[int], decodes: int, degree: int) -> list[int]:
        """See `Batching.chunks`. Decodes do not count in the budget."""
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
    """Rule of this project's engine, which has compiled shapes (`amoeba_jax.programs.buckets`).

    The first prompt determines the chunk size of a step. A step has 1 or 4 chunks of that size.

    Attributes:
        max_num_seqs: maximum number of sequences for each device of an instance.
        max_num_batched_tokens: maximum prompt tokens of a step.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512

    def chunks(self, left: Sequence[int], decodes: int, degree: int) -> list[int]:
        """See `Batching.chunks`."""
        chunk = self.chunk_size(left[0])
        taken = self.most_prompts(decodes, len(left), chunk, degree)
        return [min(tokens, chunk) for tokens in left[:taken]]

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Chunk sizes in tokens, ascending: the budget divided by powers of four."""
        sizes = [self.max_num_batched_tokens]
        while sizes[0] >= _COARSE * _MIN_CHUNK:
            sizes.insert(0, sizes[0] // _COARSE)
        return tuple(sizes)

    def chunk_size(self, length: int) -> int:
        """Return the chunk size for a prompt with `length` tokens left.

        This is the smallest size that holds them, or the next smaller size if they would not fill half of it.
        """
        sizes = self.chunk_sizes
        index = next((index for index, size in enumerate(sizes) if size >= length), len(sizes) - 1)
        return sizes[index - 1] if index and length * 2 <= sizes[index] else sizes[index]

    def most_prompts(self, decodes: int, waiting: int, chunk: int, degree: int) -> int:
        """Return the number of prompts in one step: up to four if at least three wait and there is room, else one."""
        most = self.max_num_seqs * degree
        several = _COARSE * chunk <= self.max_num_batched_tokens and most >= _COARSE
        if several and waiting + 1 >= _COARSE and decodes + _COARSE <= most:
            return min(waiting, _COARSE)
        return 1
