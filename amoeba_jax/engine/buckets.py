"""The step shapes that programs are compiled for: few enough to compile, close enough to waste little."""

from functools import cached_property

from amoeba_jax.engine.batch import BatchShape

# Shorter chunks of a prompt are padded up to this: fewer programs, and a step this small costs the same anyway.
MIN_CHUNK = 16
# Batches of prompts, and of decodes beside a prompt, come in powers of four: each size multiplies the programs.
_COARSE = 4
_MIN_MIXED_DECODES = 8


class Buckets:
    """Step shapes of an engine. A step decodes up to `max_num_seqs` sequences and computes up to
    `max_num_batched_tokens` prompt tokens (both powers of two), in either or both of two groups:

    - decode: `(B, 1)`, B a power of two;
    - prompts: `(1, T)`, `(4, T)` or `(16, T)`, T a power of two, as far as the token budget goes.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, table_width: int):
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.table_width = table_width

    @cached_property
    def decode_sizes(self) -> tuple[int, ...]:
        """B of steps that only decode."""
        return tuple(1 << power for power in range(self.max_num_seqs.bit_length()))

    @cached_property
    def mixed_decode_sizes(self) -> tuple[int, ...]:
        """B of steps that compute prompts too."""
        sizes = {self.max_num_seqs}
        size = _MIN_MIXED_DECODES
        while size < self.max_num_seqs:
            sizes.add(size)
            size *= _COARSE
        return tuple(sorted(sizes))

    @cached_property
    def chunk_sizes(self) -> tuple[int, ...]:
        """T of prompt chunks."""
        smallest = min(MIN_CHUNK, self.max_num_batched_tokens)
        powers = range(smallest.bit_length() - 1, self.max_num_batched_tokens.bit_length())
        return tuple(1 << power for power in powers)

    def chunk_rows(self, chunk: int) -> tuple[int, ...]:
        """How many prompts a step may take together in chunks of this size."""
        sizes, rows = [], 1
        while rows * chunk <= self.max_num_batched_tokens:
            sizes.append(rows)
            rows *= _COARSE
        return tuple(sizes)

    def chunk_size(self, length: int) -> int:
        """T for a prompt with `length` tokens left: the smallest that holds them, or the largest there is."""
        return _fitting(self.chunk_sizes, min(length, self.chunk_sizes[-1]))

    def step(self, num_decodes: int, num_prompts: int = 0, chunk: int = 0) -> BatchShape:
        """The bucket for so many decodes and so many prompts in chunks of `chunk`, a chunk size."""
        groups = []
        if num_decodes:
            sizes = self.mixed_decode_sizes if num_prompts else self.decode_sizes
            groups.append((_fitting(sizes, num_decodes), 1))
        if num_prompts:
            groups.append((_fitting(self.chunk_rows(chunk), num_prompts), chunk))
        return BatchShape(tuple(groups), self.table_width)

    def all(self) -> list[BatchShape]:
        """Every step shape that serving can need."""
        prompts = [(rows, chunk) for chunk in self.chunk_sizes for rows in self.chunk_rows(chunk)]
        groups: list[tuple[tuple[int, int], ...]] = [((size, 1),) for size in self.decode_sizes]
        groups += [(prompt,) for prompt in prompts]
        groups += [((size, 1), prompt) for size in self.mixed_decode_sizes for prompt in prompts]
        return [BatchShape(group, self.table_width) for group in groups]


def _fitting(sizes: tuple[int, ...], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
