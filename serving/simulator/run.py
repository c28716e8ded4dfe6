"""Running request of a simulated instance.

A decoding request is not updated after each step. Instead, many methods compute its number of tokens from their
argument `steps`, the number of decode steps that the instance has run.
"""

from dataclasses import replace

from serving.scheduler import RunningRequest, WaitingRequest
from serving.simulator.prefix_store import PromptBlocks


class Run:
    """Running request of a simulated instance.

    Attributes:
        request: request as the scheduler saw it in the queue.
        index: row of the request in `tally.Records`.
        output_left: number of tokens left to generate. While the request decodes, this remains the number from the
            start of decoding on its instance, and `left` returns the present number.
        prompt_left: number of prompt tokens left to compute.
        base: number of tokens of the request when it started to decode on its instance. 0: it has not started.
        joined: number of decode steps that the instance had run when the request started to decode there.
        last_token_s: time of the latest token before a preemption. None: there is no such token.
        added_s: time at which the policy sent the request to the instance.
        queued_s: seconds in the queue, including waits after preemptions.
        blocks: blocks of the prompt for the prefix cache. None: unknown.
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
        """Sort key `(priority, arrival, row)`. The request with the smallest key is served first and preempted last."""
        return (self.request.priority, self.request.arrival_s, self.index)

    @property
    def computed(self) -> int:
        """Number of prompt tokens that are computed or were in the prefix cache."""
        return self.request.prompt_tokens - self.prompt_left

    def num_tokens(self, steps: int) -> int:
        """Return the number of tokens of the request after `steps` decode steps of the instance.

        These are the prompt and, if the request decodes, the generated tokens.
        """
        return self.base + steps - self.joined if self.base else self.request.prompt_tokens

    def left(self, steps: int) -> int:
        """Return the number of tokens left to generate after `steps` decode steps of the instance."""
        return self.output_left - (steps - self.joined) if self.base else self.output_left

    def start_decoding(self, num_tokens: int, steps: int) -> None:
        """Record that the request starts to decode with `num_tokens` tokens. Each later decode step adds a token."""
        self.base, self.joined = num_tokens, steps

    def view(self, steps: int) -> RunningRequest:
        """Return the running request in the form that policies use."""
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
        """Convert the preempted request to a waiting request for the queue.

        Its generated tokens become part of its prompt. Its waiting time includes its earlier time in the queue.
        """
        since_s = now_s - self.queued_s
        return replace(self.request, prompt_tokens=self.num_tokens(steps), started=True, waiting_since_s=since_s)
