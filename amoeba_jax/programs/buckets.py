"""Step shapes for which programs are compiled.

With fewer shapes, a warm-up is faster. With more shapes, steps waste less time on padding. docs/startup.md has
measurements, made by `benchmarks/step_shapes.py`.
"""

import math
from functools import cached_property

from amoeba_jax.config import EngineConfig
from amoeba_jax.programs.batch import BatchShape

# Shorter chunks are padded to this many tokens. A smaller step would take the same time.
MIN_CHUNK = 16
# Ratio of neighboring chunk sizes, and the number of prompts that one step may take. More sizes need more programs.
_COARSE = 4
# Rows of a step with one prompt and few decoding sequences.
_FEW_ROWS = 8
# Logits of a whole chunk take `[V, T]` floats, so that log-probabilities of prompts use shorter chunks.
MAX_PROMPT_LOGITS_CHUNK = 64


def hidden_tokens(config: EngineConfig, width: int) -> int:
    """Return the number of tokens of the largest step, rounded up to a multiple of 16.

    Args:
        config: settings of the engine.
        width: maximum number of running sequences of the largest instance, divided by `max_num_seqs`
            (`EnginePlan.width`).
    """
    largest = config.max_num_batched_tokens + config.max_num_seqs * width - 1
    return -(-largest // 16) * 16


class Buckets:
    """Step shapes of instances of one degree.

    `(B, T)` stands for B sequences with T tokens each. A step has one of three forms:

    - only decodes: `(B, 1)`, with B a power of two.
    - one prompt: `(1, T)`, and decodes in the remaining rows. The step has `few_rows` or `max_num_seqs` rows.
    - up to four prompts: `(4, T)`, and decodes in the remaining rows. The step has `max_num_seqs` rows. This form
      exists only if 4 T is at most `max_num_batched_tokens`, and `max_num_seqs` is at least 4.

    The chunk size T is `max_num_batched_tokens` divided by 1, 4, 16, and so on, but not below `MIN_CHUNK`. Unused rows
    are padding.

    Args:
        max_num_seqs: maximum number of sequences that an instance decodes in a step, a power of two.
        max_num_batched_tokens: maximum number of prompt tokens in a step, a power of two.
        table_width: number of entries of a block table.
        few_rows: smaller number of rows for steps with one prompt. It must be equal for all degrees, because a step
            keeps its shape while layers change their degree. None: 8, or `max_num_seqs` if that is less.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, table_width: int, few_rows: int | None = None):
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.table_width = table_width
        self.few_rows = min(_FEW_ROWS, max_num_seqs) if few_rows is None else few_rows

    @cached_property
    def decode_sizes(self) -> tuple[int, ...]:
        """Possible numbers of rows in a step that only decodes. Steps during transitions use the same numbers."""
        return tuple(1 << power for power in range(self.max_num_seqs.bit_length()))

    @cached_property
    def mixed_rows(self) -> tuple[int, ...]:
        """Possible numbers of rows in a step with one prompt."""
        return tuple(sorted({self.few_rows, self.max_num_seqs}))

    @cached_property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Possible lengths of prompt chunks in tokens, in ascending order."""
        return _by_quarters(self.max_num_batched_tokens, MIN_CHUNK)

    @cached_property
    def prompt_logits_chunks(self) -> tuple[int, ...]:
        """Possible lengths of prompt chunks, in tokens, if a request asks for log-probabilities of its prompt."""
        return tuple(size for size in self.chunk_sizes if size <= MAX_PROMPT_LOGITS_CHUNK) or self.chunk_sizes[:1]

    def chunk_rows(self, chunk: int) -> tuple[int, ...]:
        """Return the possible numbers of prompts in a step with chunks of `chunk` tokens: `(1,)` or `(1, 4)`."""
        several = _COARSE * chunk <= self.max_num_batched_tokens and self.max_num_seqs >= _COARSE
        return (1, _COARSE) if several else (1,)

    def chunk_size(self, length: int, at_most: float = math.inf) -> int:
        """Return the chunk size for a prompt with `length` remaining tokens.

        The smallest size that holds all tokens is chosen, or the largest size if no size holds them. If the tokens fill
        at most half of the chosen size, the next smaller size is returned: several small steps then take less time than
        one step with padding. For example, with the sizes 16 and 64, 33 tokens get 64, and 32 tokens get 16.

        Sizes above `at_most` are not considered. If all sizes are above `at_most`, the smallest size is returned.
        """
        sizes = [size for size in self.chunk_sizes if size <= at_most] or self.chunk_sizes[:1]
        index = next((index for index, size in enumerate(sizes) if size >= length), len(sizes) - 1)
        return sizes[index - 1] if index and length * 2 <= sizes[index] else sizes[index]

    def most_prompts(self, num_decodes: int, waiting: int, chunk: int) -> int:
        """Return the number of prompts to compute in a step: 1, 3 or 4.

        The number is above 1 if three conditions hold: at least three prompts wait, `chunk_rows(chunk)` contains 4, and
        `num_decodes + 4` is at most `max_num_seqs`.

        Args:
            num_decodes: number of sequences that the step also decodes.
            waiting: number of prompts that wait, at least 1.
            chunk: size of the prompt chunks, in tokens.
        """
        several = self.chunk_rows(chunk)[-1]
        if several > 1 and waiting + 1 >= several and num_decodes + several <= self.max_num_seqs:
            return min(waiting, several)
        return 1

    def step(self, num_decodes: int, num_prompts: int = 0, chunk: int = 0) -> BatchShape:
        """Return the smallest shape for `num_decodes` decodes and `num_prompts` prompts in chunks of `chunk` tokens."""
        if not num_prompts:
            return self._shape(_fitting(self.decode_sizes, num_decodes), 0, 0)
        prompts = _fitting(self.chunk_rows(chunk), num_prompts)
        rows = self.max_num_seqs if prompts > 1 else _fitting(self.mixed_rows, num_decodes + 1)
        return self._shape(rows, prompts, chunk)

    def all(self) -> list[BatchShape]:
        """Return all step shapes."""
        shapes = [self._shape(size, 0, 0) for size in self.decode_sizes]
        for chunk in self.chunk_sizes:
            shapes += [self._shape(rows, 1, chunk) for rows in self.mixed_rows]
            shapes += [self._shape(self.max_num_seqs, prompts, chunk) for prompts in self.chunk_rows(chunk)[1:]]
        return shapes

    def _shape(self, num_rows: int, num_prompts: int, chunk: int) -> BatchShape:
        decodes = ((num_rows - num_prompts, 1),) if num_rows > num_prompts else ()
        return BatchShape((*decodes, (num_prompts, chunk)) if num_prompts else decodes, self.table_width)


def _by_quarters(largest: int, smallest: int) -> tuple[int, ...]:
    """Return `largest` divided by 1, 4, 16, and so on, in ascending order.

    Results below `smallest` are left out, except `largest` itself.
    """
    sizes = [largest]
    while sizes[0] >= _COARSE * smallest:
        sizes.insert(0, sizes[0] // _COARSE)
    return tuple(sizes)


def _fitting(sizes: tuple[int, ...], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
