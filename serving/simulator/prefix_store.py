"""Which prefixes an instance still has: blocks of tokens by id."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class PromptBlocks:
    """The blocks of a prompt. A block's id stands for all tokens of the prompt up to its end, as in Mooncake's traces.

    Attributes:
        tokens: of one block.
        num_held: how many of the first ones the instance of the request has.
    """

    ids: tuple[int, ...]
    tokens: float
    num_held: int = 0

    @property
    def held(self) -> tuple[int, ...]:
        """Ids of the blocks that its instance has."""
        return self.ids[: self.num_held]


class PrefixStore:
    """Blocks of prompts that were computed before. Those of running requests are part of what these use; the others
    take only room that no request uses, and those used least recently go first, the ends of prompts before their
    beginnings."""

    def __init__(self) -> None:
        self._holders: Counter[int] = Counter()
        self._idle: OrderedDict[int, float] = OrderedDict()
        """Tokens of the blocks that no request holds, least recently used first."""
        self._idle_tokens = 0.0
        self._before: dict[int, int | None] = {}
        """The block before each one, in its prompt."""

    def __contains__(self, block: int) -> bool:
        return block in self._holders or block in self._idle

    @property
    def idle_tokens(self) -> float:
        """Tokens of the blocks that no request holds."""
        return self._idle_tokens

    def find(self, prompt: PromptBlocks, prompt_tokens: int) -> int:
        """Have a prompt hold its first blocks that are here. Returns their tokens, never the prompt's last one."""
        for block in prompt.ids[prompt.num_held :]:
            if block not in self:
                break
            self._hold(block)
            prompt.num_held += 1
        return min(int(prompt.num_held * prompt.tokens), max(prompt_tokens - 1, 0))

    def add(self, prompt: PromptBlocks) -> None:
        """Have a prompt that was computed hold all of its blocks."""
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
        """A request has ended, or lost its pages."""
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
        """Drop blocks that no one holds until they take no more than `free_tokens`."""
        while self._idle and self._idle_tokens > free_tokens:
            block, tokens = self._idle.popitem(last=False)
            self._idle_tokens -= tokens
            del self._before[block]

    def take_held(self, prompt: PromptBlocks) -> None:
        """A request has come with its pages, from another instance."""
        before = None
        for block in prompt.held:
            self._before.setdefault(block, before)
            self._hold(block)
            before = block

    def take_idle(self, other: "PrefixStore", blocks: Sequence[int] | None = None) -> None:
        """Take blocks, by default all, that no one holds from an instance that this one takes the place of. Requests
        have come before."""
        for block in other._idle if blocks is None else blocks:
            if block not in self:
                self._before[block] = other._before[block]
                self._put(block, other._idle[block])

    def deal_idle(self, parts: "Sequence[PrefixStore]") -> None:
        """Give the blocks that no one holds to the parts of an instance that splits, those of one beginning together:
        to the part with a request that has this beginning, or to the one with fewest so far."""
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
