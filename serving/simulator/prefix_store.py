"""Prefix cache of a simulated instance.

In this module, a block is a series of consecutive prompt tokens with an id (not the class `block.Block`). A running
request holds the blocks of its prompt. A block that no request holds is idle. An idle block stays in the cache until
its memory is needed.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class PromptBlocks:
    """Blocks of a prompt, as in Mooncake's traces. A block is a series of consecutive prompt tokens.

    Two prompts have the same id for a block if they are equal up to the end of this block.

    Attributes:
        ids: ids of the blocks in order.
        tokens: number of tokens in each block.
        num_held: number of blocks, from the first one on, that the request holds in the cache of its instance.
    """

    ids: tuple[int, ...]
    tokens: float
    num_held: int = 0

    @property
    def held(self) -> tuple[int, ...]:
        """Ids of the blocks that the request holds."""
        return self.ids[: self.num_held]


class PrefixStore:
    """Prefix cache of a simulated instance. It consists of prompt blocks: series of prompt tokens with an id.

    A running request holds the blocks of its prompt. A block that no request holds is idle. If requests need the memory
    of idle blocks, the least recently used block is evicted first. The end of a prompt is evicted before its beginning.
    """

    def __init__(self) -> None:
        self._holders: Counter[int] = Counter()
        """Number of requests that hold each block."""
        self._idle: OrderedDict[int, float] = OrderedDict()
        """Number of tokens of each idle block, least recently used first."""
        self._idle_tokens = 0.0
        self._before: dict[int, int | None] = {}
        """Previous block of the prompt, by block. None: it is the first block."""

    def __contains__(self, block: int) -> bool:
        return block in self._holders or block in self._idle

    @property
    def idle_tokens(self) -> float:
        """Number of tokens in all idle blocks, which no running request holds."""
        return self._idle_tokens

    def find(self, prompt: PromptBlocks, prompt_tokens: int) -> int:
        """Return the number of tokens in the longest cached prefix of a prompt.

        The request of the prompt then holds the blocks of this prefix. The result is at most `prompt_tokens - 1`,
        because the last prompt token must be computed.
        """
        for block in prompt.ids[prompt.num_held :]:
            if block not in self:
                break
            self._hold(block)
            prompt.num_held += 1
        return min(int(prompt.num_held * prompt.tokens), max(prompt_tokens - 1, 0))

    def add(self, prompt: PromptBlocks) -> None:
        """Add all blocks of a computed prompt to the cache. The request of the prompt then holds these blocks."""
        before = prompt.ids[prompt.num_held - 1] if prompt.num_held else None
        for block in prompt.ids[prompt.num_held :]:
            self._before.setdefault(block, before)
            self._hold(block)
            before = block
        prompt.num_held = len(prompt.ids)

    def _hold(self, block: int) -> None:
        self._idle_tokens -= self._idle.pop(block, 0.0)
        self._holders[block] += 1

    def release(self, prompt: PromptBlocks) -> None:
        """Release all blocks that a request holds. Blocks that no other request holds become idle."""
        for block in reversed(prompt.held):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._put(block, prompt.tokens)
        prompt.num_held = 0

    def _put(self, block: int, tokens: float) -> None:
        self._idle[block] = tokens
        self._idle_tokens += tokens

    def shrink(self, free_tokens: int) -> None:
        """Evict idle blocks until all idle blocks together have at most `free_tokens` tokens."""
        while self._idle and self._idle_tokens > free_tokens:
            block, tokens = self._idle.popitem(last=False)
            self._idle_tokens -= tokens
            del self._before[block]

    def take_held(self, prompt: PromptBlocks) -> None:
        """Add the blocks that a request held on its previous instance. The request then holds them in this store.

        Call this method if a request and its KV pages move to the instance of this store.
        """
        before = None
        for block in prompt.held:
            self._before.setdefault(block, before)
            self._hold(block)
            before = block

    def take_idle(self, other: "PrefixStore", blocks: Sequence[int] | None = None) -> None:
        """Copy idle blocks from `other`, the store of an old instance, after a merge or split.

        `blocks` has the ids of the blocks to copy. None: all idle blocks. Blocks that are already in this store are
        skipped. Before the call, the caller must call `take_held` for each request that moves to this store.
        """
        for block in other._idle if blocks is None else blocks:
            if block not in self:
                self._before[block] = other._before[block]
                self._put(block, other._idle[block])

    def deal_idle(self, parts: "Sequence[PrefixStore]") -> None:
        """Copy the idle blocks to `parts`, the stores of the new instances after a split.

        Each block goes to one store. All blocks of prompts with the same first block go to the same store. This is the
        store that already has the first block, or the store with the fewest idle tokens if no store has it.
        """
        groups: dict[int, list[int]] = {}
        for block in self._idle:
            groups.setdefault(self._beginning(block), []).append(block)
        for first, blocks in groups.items():
            part = next((part for part in parts if first in part), None)
            (part or min(parts, key=lambda part: part.idle_tokens)).take_idle(self, blocks)

    def _beginning(self, block: int) -> int:
        while (before := self._before.get(block)) is not None:
            block = before
        return block
