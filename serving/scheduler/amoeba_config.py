"""Settings of the policy `amoeba`, each a departure from its paper: docs/scheduling.md."""

from dataclasses import dataclass

from serving.scheduler.split_rule import SplitConfig


@dataclass(frozen=True)
class AmoebaConfig:
    """What can be tuned."""

    split_free_share: float = 0.5
    """A merged instance whose long requests are done splits once this share of its KV cache is free. Less splits
    earlier and moves more pages; the pages in use must fit the lower degree in any case."""
    linger_s: float = 60.0
    """A merged instance goes on for this long after its last long request, so that the next one finds it: long requests
    with shorter gaps between them are one burst, with one merge and one split. Short requests are served faster by what
    it splits into, so it does not wait when one finds no room, or when they leave less than `split_free_share` of the
    instance free. 0 is the paper's rule."""
    partial_splits: bool = True
    """A merged instance splits to the least degree that its long requests need, and need not wait for their end."""
    ttft_slo_s: float | None = 10.0
    """A request's first token should come within this time of its arrival (AMOEBA 4.3), where the request says nothing
    else. A long request that would wait for longer for a merged instance has another merged, if it has its first token
    earlier there by the times that were measured, and no short request lacks room. None: it waits."""
    tpot_slo_s: float | None = 0.1
    """Each further token should take no longer (AMOEBA 4.3): short requests keep away from instances with longer decode
    steps where they can. None: no matter."""
    merge_again_after_s: float | None = None
    """A long request that has waited this long for a merged instance may have another merged for it, whatever was
    measured. None: only `ttft_slo_s` counts."""
    merge_to: int = 1
    """Merges go to this degree at least: long requests are served faster, and fewer instances are left for short ones.
    1: to the least degree that holds the request."""
    merge_for_cache_s: float | None = 2.0
    """Instances merge, one group after the other, while short requests have found no room in the KV cache for this
    long though instances had slots, if a higher degree has room for more requests on each device by a tenth; the last
    group once another has proved to be as fast. Where a merged instance serves fewer tokens a second and device, it
    splits again. None: only long requests merge."""
    lookahead: int = 32
    """A decision goes past at most that many requests that find no place: with thousands that wait it takes no longer,
    and smaller requests that come later overtake no more than these."""
    reserve_memory_s: float = 600.0
    """Room is kept for a long request as large as the largest that came within this time."""
    reserved_growth: float = 0.0
    """Share kept free of what running requests may still grow by. 0 admits as vLLM does, and the engine preempts when
    pages run out; with 1 that never happens, and the cache is less full."""

    @property
    def splits(self) -> SplitConfig:
        """When instances split."""
        return SplitConfig(self.split_free_share, self.linger_s, self.partial_splits)
