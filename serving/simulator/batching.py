"""Rules that choose the prompt chunks of a step. A chunk is the part of a prompt that one step computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Batching(Protocol):
    """Rule that chooses the prompt chunks of a step.

    The rule does not affect decoding sequences: every decoding sequence generates a token in every step.
    """

    def chunks(self, left: Sequence[int], decodes: int, degree: int) -> list[int]:
        """Return the sizes in tokens of the prompt chunks that the next step computes.

        Chunk `i` is a part of prompt `i`. With fewer chunks than prompts, the last prompts wait for later steps.

        Args:
            left: for each prompt, the number of tokens that are not computed yet.
            decodes: number of decoding sequences in the same step.
            degree: tensor-parallel degree of the instance.
        """
        ...


@dataclass(frozen=True)
class TokenBudget:
    """Rule that limits the prompt tokens of a step, as in vLLM's chunked prefill.

    A step takes prompts in order, until it has `max_num_batched_tokens` prompt tokens. It may compute only a part of
    the last prompt.
    """

    max_num_batched_tokens: int = 2048

    def chunks(self, left: Sequence[int], decodes: int, degree: int) -> list[int]:
        """Return the sizes in tokens of the prompt chunks that the next step computes (`Batching.chunks`).

        Only prompt tokens count towards `max_num_batched_tokens`, so `decodes` has no effect.
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
    """Rule of this project's engine, which pads each step to a compiled shape (`amoeba_jax.programs.buckets`).

    A compiled shape has 1 or 4 prompt chunks of equal size. The first waiting prompt determines this size.

    Attributes:
        max_num_seqs: maximum number of sequences in a step at degree 1. At degree `d`, the maximum is `d` times this.
        max_num_batched_tokens: maximum number of prompt tokens in a step.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512

    def chunks(self, left: Sequence[int], decodes: int, degree: int) -> list[int]:
        """Return the sizes in tokens of the prompt chunks that the next step computes (`Batching.chunks`)."""
        chunk = self.chunk_size(left[0])
        taken = self.most_prompts(decodes, len(left), chunk, degree)
        return [min(tokens, chunk) for tokens in left[:taken]]

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Chunk sizes in tokens, ascending.

        The largest size is `max_num_batched_tokens`. Each other size is a quarter of the next larger size, at least 16.
        """
        sizes = [self.max_num_batched_tokens]
        while sizes[0] >= _COARSE * _MIN_CHUNK:
            sizes.insert(0, sizes[0] // _COARSE)
        return tuple(sizes)

    def chunk_size(self, length: int) -> int:
        """Return the chunk size in tokens for a prompt with `length` tokens left to compute.

        The result is the smallest of the `chunk_sizes` that holds all tokens, or the largest size if none does. If at
        least half of this chunk would be padding, the result is the next smaller size instead. With the sizes 32, 128
        and 512, 100 tokens give 128. 60 tokens give 32, because they fill less than half of 128.
        """
        sizes = self.chunk_sizes
        index = next((index for index, size in enumerate(sizes) if size >= length), len(sizes) - 1)
        return sizes[index - 1] if index and length * 2 <= sizes[index] else sizes[index]

    def most_prompts(self, decodes: int, waiting: int, chunk: int, degree: int) -> int:
        """Return the number of prompts of which the next step computes a chunk: 1, 3 or 4.

        For 3 or 4 prompts, the step uses the compiled shape with 4 chunks. This shape needs at least 3 waiting prompts,
        room for 4 chunks in `max_num_batched_tokens`, and room for 4 sequences besides the decoding sequences.

        Args:
            decodes: number of decoding sequences in the step.
            waiting: number of prompts with tokens left to compute.
            chunk: tokens of each chunk.
            degree: tensor-parallel degree of the instance. The maximum number of sequences is `max_num_seqs` times the
                degree.
        """
        most = self.max_num_seqs * degree
        several = _COARSE * chunk <= self.max_num_batched_tokens and most >= _COARSE
        if several and waiting + 1 >= _COARSE and decodes + _COARSE <= most:
            return min(waiting, _COARSE)
        return 1
