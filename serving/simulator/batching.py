"""Rules that choose the prompt chunks of a step. A chunk is the part of a prompt that one step computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Batching(Protocol):
    """Rule that chooses the prompt chunks of a step.

    The rule does not affect decoding sequences: every decoding sequence generates a token in every step.
    """

    def chunks(self, left: Sequence[int], decodes: int, degree: int) -> list[int]:
        """Choose the prompt chunks of the next step. Return the size of each chunk in tokens.

        The sizes belong to the first prompts in `left`, in the same order. All other prompts wait.

        Args:
            left: number of tokens that are not computed yet, for each prompt.
            decodes: number of decoding sequences in the same step.
            degree: tensor-parallel degree of the instance.
        """
        ...


@dataclass(frozen=True)
class TokenBudget:
    """Rule of vLLM's chunked prefill, which limits the prompt tokens of a step.

    A step takes prompts in order, until it has `max_num_batched_tokens` prompt tokens. The last of these prompts may be
    computed only in part.
    """

    max_num_batched_tokens: int = 2048

    def chunks(self, left: Sequence[int], decodes: int, degree: int) -> list[int]:
        """Choose the prompt chunks of the next step (`Batching.chunks`).

        Only prompt tokens count towards `max_num_batched_tokens`.
        """
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
    """Rule of this project's engine, whose steps have compiled shapes (`amoeba_jax.programs.buckets`).

    A step has room for 1 or 4 prompt chunks of equal size. The first prompt determines the size.

    Attributes:
        max_num_seqs: maximum number of sequences in a step, for each device of the instance.
        max_num_batched_tokens: maximum number of prompt tokens in a step.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512

    def chunks(self, left: Sequence[int], decodes: int, degree: int) -> list[int]:
        """Choose the prompt chunks of the next step (`Batching.chunks`)."""
        chunk = self.chunk_size(left[0])
        taken = self.most_prompts(decodes, len(left), chunk, degree)
        return [min(tokens, chunk) for tokens in left[:taken]]

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Chunk sizes in tokens, ascending.

        The sizes are `max_num_batched_tokens` divided by 1, 4, 16 and so on, while the result is at least 16.
        """
        sizes = [self.max_num_batched_tokens]
        while sizes[0] >= _COARSE * _MIN_CHUNK:
            sizes.insert(0, sizes[0] // _COARSE)
        return tuple(sizes)

    def chunk_size(self, length: int) -> int:
        """Return the chunk size in tokens for a prompt of which `length` tokens are not computed yet.

        The normal size is the smallest size that holds all `length` tokens. If no size is large enough, it is the
        largest size. If the tokens would fill at most half of the normal size, the result is the next smaller size, if
        there is one.
        """
        sizes = self.chunk_sizes
        index = next((index for index, size in enumerate(sizes) if size >= length), len(sizes) - 1)
        return sizes[index - 1] if index and length * 2 <= sizes[index] else sizes[index]

    def most_prompts(self, decodes: int, waiting: int, chunk: int, degree: int) -> int:
        """Return the number of prompts in the next step.

        The result is 3 or 4 if at least 3 prompts wait, and `max_num_seqs` and `max_num_batched_tokens` allow 4
        prompts. In all other cases, the result is 1.

        Args:
            decodes: number of decoding sequences in the step.
            waiting: number of prompts that are not computed yet.
            chunk: tokens of each chunk.
            degree: tensor-parallel degree of the instance. The maximum number of sequences is `max_num_seqs` times the
                degree.
        """
        most = self.max_num_seqs * degree
        several = _COARSE * chunk <= self.max_num_batched_tokens and most >= _COARSE
        if several and waiting + 1 >= _COARSE and decodes + _COARSE <= most:
            return min(waiting, _COARSE)
        return 1
