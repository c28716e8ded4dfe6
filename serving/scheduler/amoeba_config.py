"""Settings of the policy `amoeba`. docs/scheduling.md compares them with the paper."""

from dataclasses import dataclass

from serving.scheduler.split_rule import SplitConfig


@dataclass(frozen=True)
class AmoebaConfig:
    """Settings of the policy `amoeba`."""

    split_free_share: float = 0.5
    """Share of the KV cache that must be free before an instance without long requests splits.

    A lower value splits earlier and moves more pages. If a short request finds no room, this share does not matter. In
    any case, the running requests must fit the instances after the split.
    """
    linger_s: float = 60.0
    """Seconds that a merged instance stays merged after its last long request. The paper's value is 0.

    A long request that arrives in this time needs no merge. The instance splits earlier if a short request finds no
    room. If less than `split_free_share` of its cache is free, it accepts no more requests, and splits when enough is
    free.
    """
    partial_splits: bool = True
    """Whether an instance splits before its long requests end, to the lowest degree that holds them."""
    ttft_slo_s: float | None = 10.0
    """Limit in seconds for the time from arrival to first token (AMOEBA 4.3), for requests without their own limit.

    If a long request would miss the limit, a second group merges for it. Two conditions must hold: according to
    measured durations, the merge is faster than waiting, and no short request lacks room. None: no limit, so long
    requests wait.
    """
    tpot_slo_s: float | None = 0.1
    """Limit in seconds for each further token (AMOEBA 4.3), for requests without their own limit. None: no limit.

    Short requests avoid instances with longer decode steps.
    """
    merge_again_after_s: float | None = None
    """Seconds of waiting after which a second group merges for a long request. Measured durations are ignored.

    None: only `ttft_slo_s` causes second merges.
    """
    merge_to: int = 1
    """Lowest degree to which instances merge. 1: the lowest degree that holds the request.

    A higher value serves long requests faster, and leaves fewer instances for short requests.
    """
    lookahead: int = 32
    """Maximum number of waiting requests that one decision skips because there is no room.

    It bounds the decision's time.
    """
    reserve_memory_s: float = 600.0
    """Seconds for which room is kept for a long request as large as the largest recent one."""
    reserved_growth: float = 0.0
    """KV cache to keep free for running requests, as a share of the tokens that they may still generate.

    With 0, requests are admitted as in vLLM, and preempted if pages run out. With 1, no request is ever preempted for
    pages.
    """

    @property
    def splits(self) -> SplitConfig:
        """Settings of the rule that decides when merged instances split."""
        return SplitConfig(self.split_free_share, self.linger_s, self.partial_splits)
