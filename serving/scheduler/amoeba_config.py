"""Settings of the policy `amoeba`. docs/scheduling.md compares them with the paper."""

from dataclasses import dataclass

from serving.scheduler.split_rule import SplitConfig


@dataclass(frozen=True)
class AmoebaConfig:
    """Settings of the policy `amoeba`."""

    split_free_share: float = 0.5
    """Share of the KV cache that must be free before an instance without long requests splits. A lower value splits
    earlier and moves more pages. The requests must fit the parts in any case."""
    linger_s: float = 60.0
    """Seconds that a merged instance stays after its last long request, so that the next one needs no merge. It does
    not linger while a short request lacks room, or if less than `split_free_share` is free. The paper's value is 0."""
    partial_splits: bool = True
    """Whether an instance splits to the lowest degree that holds its long requests, instead of waiting for their
    end."""
    ttft_slo_s: float | None = 10.0
    """Limit in seconds for the time from arrival to first token (AMOEBA 4.3), for requests without their own limit. A
    long request that would miss it causes a second merge if that is measured to be faster and no short request lacks
    room. None: it waits."""
    tpot_slo_s: float | None = 0.1
    """Limit in seconds for each further token (AMOEBA 4.3). Short requests avoid instances with longer decode steps.
    None: no limit."""
    merge_again_after_s: float | None = None
    """Seconds of waiting after which a long request may cause a second merge regardless of measurements. None: only
    `ttft_slo_s` counts."""
    merge_to: int = 1
    """Lowest degree that merges go to. A higher value serves long requests faster and leaves fewer instances for short
    ones. 1: the lowest degree that holds the request."""
    lookahead: int = 32
    """Maximum number of requests without room that one decision skips. It bounds the time of a decision."""
    reserve_memory_s: float = 600.0
    """Seconds for which the size of the largest long request is remembered, to keep room for the next one."""
    reserved_growth: float = 0.0
    """Share of the possible growth of running requests that stays free. With 0, requests are admitted as in vLLM and
    preempted if pages run out. With 1, no request is ever preempted for pages."""

    @property
    def splits(self) -> SplitConfig:
        """Settings of the split rule."""
        return SplitConfig(self.split_free_share, self.linger_s, self.partial_splits)
