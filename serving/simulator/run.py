"""A request on a simulated instance."""

from dataclasses import replace

from serving.scheduler import RunningRequest, WaitingRequest
from serving.simulator.prefix_store import PromptBlocks


class Run:
    """A request that an instance computes.

    Attributes:
        request: as it waited.
        index: its row in the records.
        output_left: tokens that it will still generate.
        prompt_left: prompt tokens that are still to be computed.
        base, joined: tokens that it had when it began to decode, and the instance's count of decode steps then.
        last_token_s: when it got its last token, before it was preempted; None if it never ran.
        added_s: when its instance got it.
        queued_s: for how long it has waited in the queue, all times together.
        blocks: those of its prompt; None where the trace has none.
    """

    __slots__ = (
        "added_s",
        "base",
        "blocks",
        "index",
        "joined",
        "last_token_s",
        "output_left",
        "prompt_left",
        "queued_s",
        "request",
    )

    def __init__(
        self,
        request: WaitingRequest,
        index: int,
        output_left: int,
        last_token_s: float | None = None,
        blocks: PromptBlocks | None = None,
    ):
        self.request, self.index, self.output_left = request, index, output_left
        self.prompt_left = request.prompt_tokens
        self.base = self.joined = 0
        self.added_s = self.queued_s = 0.0
        self.last_token_s, self.blocks = last_token_s, blocks

    @property
    def order(self) -> tuple[int, float, int]:
        """Sorts the requests of an instance: those to be served first in front."""
        return (self.request.priority, self.request.arrival_s, self.index)

    @property
    def computed(self) -> int:
        """Prompt tokens that are computed, or were found in the prefix cache."""
        return self.request.prompt_tokens - self.prompt_left

    def num_tokens(self, steps: int) -> int:
        """Tokens that it has pages for, when its instance has decoded `steps` times."""
        return self.base + steps - self.joined if self.base else self.request.prompt_tokens

    def left(self, steps: int) -> int:
        """Tokens that it will still generate, when its instance has decoded `steps` times."""
        return self.output_left - (steps - self.joined) if self.base else self.output_left

    def start_decoding(self, num_tokens: int, steps: int) -> None:
        """From now on each step of the instance adds a token."""
        self.base, self.joined = num_tokens, steps

    def view(self, steps: int) -> RunningRequest:
        """What a policy sees of it."""
        r = self.request
        return RunningRequest(
            r.request_id,
            self.num_tokens(steps),
            r.max_total_tokens,
            self.prompt_left,
            r.priority,
            r.arrival_s,
            r.deadline_s,
            r.beyond_share,
            queued_s=self.queued_s,
        )

    def waiting_again(self, steps: int, now_s: float) -> WaitingRequest:
        """The request after its pages are lost: its output so far is prompt now. What it has waited before counts."""
        since_s = now_s - self.queued_s
        return replace(self.request, prompt_tokens=self.num_tokens(steps), started=True, waiting_since_s=since_s)
