"""Which prefixes an instance still has: blocks by id, least recently used first."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixStore:
    """Blocks of prompts that were computed before. A block's id stands for all tokens up to its end, as in Mooncake's
    traces. Blocks take only room that no request uses."""

    def __init__(self, block_tokens: int = 512):
        self.block_tokens = block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: Sequence[int], prompt_tokens: int) -> int:
        """Tokens of a prompt that are here: whole blocks from its start, and never the last token."""
        hits = 0
        for block in blocks:
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            hits += 1
        return min(hits * self.block_tokens, max(prompt_tokens - 1, 0))

    def add(self, blocks: Sequence[int]) -> None:
        """Keep the blocks of a prompt that was computed."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)

    def shrink(self, free_tokens: int) -> None:
        """Drop those used least recently until the rest takes no more than `free_tokens`."""
        most = max(free_tokens // self.block_tokens, 0)
        while len(self._blocks) > most:
            self._blocks.popitem(last=False)

    def merge(self, other: "PrefixStore") -> None:
        """Take in the blocks of an instance that merges with this one."""
        self.add(list(other._blocks))
