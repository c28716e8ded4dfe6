"""The step shapes that programs are compiled for: few enough to compile, close enough to waste little.

`benchmarks/step_shapes.py` measures what each row of them is worth; docs/startup.md has its figures.
"""

import math
from functools import cached_property

from amoeba_jax.config import EngineConfig
from amoeba_jax.programs.batch import BatchShape

# Shorter chunks of a prompt are padded up to this: fewer programs, and a step this small costs the same anyway.
MIN_CHUNK = 16
# Chunks come in powers of four, and as many prompts are computed together: each size multiplies the programs.
_COARSE = 4
# Rows of a step with a prompt, beside which few sequences decode.
_FEW_ROWS = 8
# Logits of a whole chunk are `[V, T]` in f32: shorter chunks keep them small where vocabularies are large.
MAX_PROMPT_LOGITS_CHUNK = 64


def hidden_tokens(config: EngineConfig) -> int:
    """Tokens of the largest step of any degree, up to a multiple of 16."""
    largest = config.max_num_batched_tokens + config.max_num_seqs * config.max_tp - 1
    return -(-largest // 16) * 16


class Buckets:
    """Step shapes of instances of one degree. A step decodes up to `max_num_seqs` sequences and computes up to
    `max_num_batched_tokens` prompt tokens (both powers of two), in either or both of two groups:

    - decode: `(B, 1)`, B a power of two;
    - prompts: one, `(1, T)`, in a step of `few_rows` rows or of all rows; or four, `(4, T)`, in a step of all rows, as
      far as the token budget goes; T that budget or a quarter of it, and so on. Decodes fill the other rows. Without
      decodes these are padding.

    Args:
        few_rows: the same at all degrees: a step with that many rows and one prompt is the same shape at all of them,
            so that it can run while layers change their degree.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, table_width: int, few_rows: int | None = None):
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.table_width = table_width
        self.few_rows = min(_FEW_ROWS, max_num_seqs) if few_rows is None else few_rows

    @cached_property
    def decode_sizes(self) -> tuple[int, ...]:
        """B of steps that only decode, those between two layouts included."""
        return tuple(1 << power for power in range(self.max_num_seqs.bit_length()))

    @cached_property
    def mixed_rows(self) -> tuple[int, ...]:
        """Rows of steps that compute a prompt too."""
        return tuple(sorted({self.few_rows, self.max_num_seqs}))

    @cached_property
    def chunk_sizes(self) -> tuple[int, ...]:
        """T of prompt chunks."""
        return _by_quarters(self.max_num_batched_tokens, MIN_CHUNK)

    @cached_property
    def prompt_logits_chunks(self) -> tuple[int, ...]:
        """T of prompts whose log-probabilities are wanted."""
        return tuple(size for size in self.chunk_sizes if size <= MAX_PROMPT_LOGITS_CHUNK) or self.chunk_sizes[:1]

    def chunk_rows(self, chunk: int) -> tuple[int, ...]:
        """How many prompts a step may take together in chunks of this size."""
        several = _COARSE * chunk <= self.max_num_batched_tokens and self.max_num_seqs >= _COARSE
        return (1, _COARSE) if several else (1,)

    def chunk_size(self, length: int, at_most: float = math.inf) -> int:
        """T for a prompt with `length` tokens left: the smallest that holds them, or the largest there is; none above
        `at_most` but the smallest.

        One that they would not fill by half goes to the next smaller: two steps of that cost less than the padding.
        """
        sizes = [size for size in self.chunk_sizes if size <= at_most] or self.chunk_sizes[:1]
        index = next((index for index, size in enumerate(sizes) if size >= length), len(sizes) - 1)
        return sizes[index - 1] if index and length * 2 <= sizes[index] else sizes[index]

    def most_prompts(self, num_decodes: int, waiting: int, chunk: int) -> int:
        """How many of the waiting prompts to take beside that many decodes: a step of four is worth its padding from
        three on, and has no more rows than there are sequences."""
        several = self.chunk_rows(chunk)[-1]
        if several > 1 and waiting + 1 >= several and num_decodes + several <= self.max_num_seqs:
            return min(waiting, several)
        return 1

    def step(self, num_decodes: int, num_prompts: int = 0, chunk: int = 0) -> BatchShape:
        """The bucket for that many decodes and that many prompts in chunks of `chunk`, a chunk size."""
        if not num_prompts:
            return self._shape(_fitting(self.decode_sizes, num_decodes), 0, 0)
        prompts = _fitting(self.chunk_rows(chunk), num_prompts)
        rows = self.max_num_seqs if prompts > 1 else _fitting(self.mixed_rows, num_decodes + 1)
        return self._shape(rows, prompts, chunk)

    def all(self) -> list[BatchShape]:
        """Every step shape that serving can need."""
        shapes = [self._shape(size, 0, 0) for size in self.decode_sizes]
        for chunk in self.chunk_sizes:
            shapes += [self._shape(rows, 1, chunk) for rows in self.mixed_rows]
            shapes += [self._shape(self.max_num_seqs, prompts, chunk) for prompts in self.chunk_rows(chunk)[1:]]
        return shapes

    def _shape(self, num_rows: int, num_prompts: int, chunk: int) -> BatchShape:
        """Prompts in chunks, and decodes in all other rows."""
        decodes = ((num_rows - num_prompts, 1),) if num_rows > num_prompts else ()
        return BatchShape((*decodes, (num_prompts, chunk)) if num_prompts else decodes, self.table_width)


def _by_quarters(largest: int, smallest: int) -> tuple[int, ...]:
    """`largest`, a quarter of it, and so on, none but the first below `smallest`; in ascending order."""
    sizes = [largest]
    while sizes[0] >= _COARSE * smallest:
        sizes.insert(0, sizes[0] // _COARSE)
    return tuple(sizes)


def _fitting(sizes: tuple[int, ...], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
