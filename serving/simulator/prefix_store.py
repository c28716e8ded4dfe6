"""Prefix cache of a simulated instance: blocks of tokens by id."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class PromptBlocks:
    """Blocks of a prompt. The id of a block identifies all tokens up to its end, as in Mooncake's traces.

    Attributes:
        ids: ids of the blocks in order.
        tokens: tokens of one block.
        num_held: number of leading blocks that the request holds on its instance.
    """

    ids: tuple[int, ...]
    tokens: float
    num_held: int = 0

    @property
    def held(self) -> tuple[int, ...]:
        """Ids of the blocks that the request holds."""
        return self.ids[: self.num_held]


class PrefixStore:
    """Cache of computed prompt blocks.

    Blocks of running requests are held and count as their tokens. Idle blocks use free room only, and are evicted in
    the order of their last use, the end of a prompt before its beginning.
    """

    def __init__(self) -> None:
        self._holders: Counter[int] = Counter()
        self._idle: OrderedDict[int, float] = OrderedDict()
        """Tokens of idle blocks, least recently used first."""
        self._idle_tokens = 0.0
        self._before: dict[int, int | None] = {}
        """Block -> previous block of its prompt."""

    def __contains__(self, block: int) -> bool:
        return block in self._holders or block in self._idle

    @property
    def idle_tokens(self) -> float:
        """Tokens of all idle blocks."""
        return self._idle_tokens

    def find(self, prompt: PromptBlocks, prompt_tokens: int) -> int:
        """Hold the cached leading blocks of a prompt, and return their tokens without the prompt's last token."""
        for block in prompt.ids[prompt.num_held :]:
            if block not in self:
                break
            self._hold(block)
            prompt.num_held += 1
        return min(int(prompt.num_held * prompt.tokens), max(prompt_tokens - 1, 0))

    def add(self, prompt: PromptBlocks) -> None:
        """Add the blocks of a computed prompt, which holds them."""
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
        """Release the blocks of a request that has ended or lost its pages."""
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
        """Evict idle blocks until they take at most `free_tokens`."""
        while self._idle and self._idle_tokens > free_tokens:
            block, tokens = self._idle.popitem(last=False)
            self._idle_tokens -= tokens
            del self._before[block]

    def take_held(self, prompt: PromptBlocks) -> None:
        """Add the blocks of a request that arrives with its pages from another instance."""
        before = None
        for block in prompt.held:
            self._before.setdefault(block, before)
            self._hold(block)
            before = block

    def take_idle(self, other: "PrefixStore", blocks: Sequence[int] | None = None) -> None:
        """Take idle blocks, by default all, from the store of a replaced instance, after its requests."""
        for block in other._idle if blocks is None else blocks:
            if block not in self:
                self._before[block] = other._before[block]
                self._put(block, other._idle[block])

    def deal_idle(self, parts: "Sequence[PrefixStore]") -> None:
        """Distribute idle blocks over the parts of a splitting instance.

        Blocks with the same first block stay together. They go to the part that has this first block, or to the part
        with the fewest idle tokens.
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
