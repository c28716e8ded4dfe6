"""Settings of the policy `amoeba`. docs/scheduling.md compares them with the paper."""

from dataclasses import dataclass

from serving.scheduler.split_rule import SplitConfig


@dataclass(frozen=True)
class AmoebaConfig:
    """Settings of the policy `amoeba`."""

    split_free_share: float = 0.5
    """Share of the KV cache that must be free before an instance without long requests splits. A lower value splits
    earlier and moves more pages. If a short request lacks room, no share must be free. In any case, the running
    requests must fit the instances after the split."""
    linger_s: float = 60.0
    """Seconds that a merged instance stays merged after its last long request, so that the next long request needs no
    merge. It splits earlier if a short request lacks room. If less than `split_free_share` of its cache is free, it
    accepts no more requests and splits when enough is free. The paper's value is 0."""
    partial_splits: bool = True
    """Whether an instance splits to the lowest degree that holds its long requests, instead of waiting for their
    end."""
    ttft_slo_s: float | None = 10.0
    """Limit in seconds for the time from arrival to first token (AMOEBA 4.3), for requests without their own limit. If
    a long request would miss the limit, a second group merges for it. The merge must be faster than waiting according
    to measured durations, and no short request may lack room. None: no limit, so long requests wait."""
    tpot_slo_s: float | None = 0.1
    """Limit in seconds for each further token (AMOEBA 4.3). Short requests avoid instances with longer decode steps.
    None: no limit."""
    merge_again_after_s: float | None = None
    """Seconds of waiting after which a second group may merge for a long request, without regard to measured durations.
    None: only `ttft_slo_s` causes second merges."""
    merge_to: int = 1
    """Lowest degree that merges go to. A higher value serves long requests faster and leaves fewer instances for short
    ones. 1: the lowest degree that holds the request."""
    lookahead: int = 32
    """Maximum number of requests without room that one decision skips. This bounds the time of a decision."""
    reserve_memory_s: float = 600.0
    """Seconds for which the size of the largest long request is remembered, to keep room for the next one."""
    reserved_growth: float = 0.0
    """Share of the tokens that running requests may still generate, for which KV cache is kept free. With 0, requests
    are admitted as in vLLM and preempted if pages run out. With 1, no request is ever preempted for pages."""

    @property
    def splits(self) -> SplitConfig:
        """Settings of the split rule."""
        return SplitConfig(self.split_free_share, self.linger_s, self.partial_splits)
