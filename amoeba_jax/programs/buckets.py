"""The step shapes that programs are compiled for: few enough to compile, close enough to waste little."""

from functools import cached_property

from amoeba_jax.programs.batch import BatchShape

# Shorter chunks of a prompt are padded up to this: fewer programs, and a step this small costs the same anyway.
MIN_CHUNK = 16
# Chunks, batches of prompts, and steps with a prompt come in powers of four: each size multiplies the programs.
_COARSE = 4
_MIN_MIXED_ROWS = 8
# Logits of a whole chunk are `[V, T]` in f32: shorter chunks keep them small where vocabularies are large.
MAX_PROMPT_LOGITS_CHUNK = 64


class Buckets:
    """Step shapes of an engine. A step decodes up to `max_num_seqs` sequences and computes up to
    `max_num_batched_tokens` prompt tokens (both powers of two), in either or both of two groups:

    - decode: `(B, 1)`, B a power of two;
    - prompts: `(1, T)`, `(4, T)` or `(16, T)`, as far as the token budget goes, T that budget or a quarter of it, and
      so on. The decodes beside them fill the step up to one of a few numbers of rows, which are powers of two again, so
      that it is sampled by the programs that there are for decodes. Without decodes these rows are padding.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, table_width: int):
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.table_width = table_width

    @cached_property
    def decode_sizes(self) -> tuple[int, ...]:
        """B of steps that only decode, those between two layouts included."""
        return tuple(1 << power for power in range(self.max_num_seqs.bit_length()))

    @cached_property
    def mixed_rows(self) -> tuple[int, ...]:
        """Rows of steps that compute prompts too."""
        return _by_quarters(self.max_num_seqs, _MIN_MIXED_ROWS)

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
        sizes, rows = [], 1
        while rows * chunk <= self.max_num_batched_tokens and rows <= self.max_num_seqs:
            sizes.append(rows)
            rows *= _COARSE
        return tuple(sizes)

    def chunk_size(self, length: int) -> int:
        """T for a prompt with `length` tokens left: the smallest that holds them, or the largest there is.

        One that they would not fill by half goes to the next smaller: two steps of that cost less than the padding.
        """
        sizes = self.chunk_sizes
        index = next((index for index, size in enumerate(sizes) if size >= length), len(sizes) - 1)
        return sizes[index - 1] if index and length * 2 <= sizes[index] else sizes[index]

    def most_prompts(self, num_decodes: int, waiting: int, chunk: int) -> int:
        """How many of the waiting prompts to take beside that many decodes: a bucket is worth its padding from half
        full on, and a step has no more rows than there are sequences."""
        fitting = (rows for rows in self.chunk_rows(chunk) if rows == 1 or num_decodes + rows <= self.max_num_seqs)
        return max(min(waiting, rows) for rows in fitting if rows == 1 or waiting * 2 >= rows)

    def step(self, num_decodes: int, num_prompts: int = 0, chunk: int = 0) -> BatchShape:
        """The bucket for that many decodes and that many prompts in chunks of `chunk`, a chunk size."""
        if not num_prompts:
            return self._shape(_fitting(self.decode_sizes, num_decodes), 0, 0)
        prompts = _fitting(self.chunk_rows(chunk), num_prompts)
        return self._shape(_fitting(self.mixed_rows, num_decodes + prompts), prompts, chunk)

    def all(self) -> list[BatchShape]:
        """Every step shape that serving can need."""
        shapes = [self._shape(size, 0, 0) for size in self.decode_sizes]
        for chunk in self.chunk_sizes:
            for prompts in self.chunk_rows(chunk):
                shapes += [self._shape(rows, prompts, chunk) for rows in self.mixed_rows if rows >= prompts]
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
