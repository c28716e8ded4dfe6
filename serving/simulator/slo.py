"""Service-level objectives (SLOs): latency limits of requests."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.simulator.errors import SimulationError

_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Slo:
    """Latency limits of requests, and the share of requests that must meet all limits.

    Limits are in seconds. Infinity means no limit. `ttft_s` limits the time to first token, `tpot_s` the mean time of
    each further token, and `e2el_s` the time from arrival to end.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2el_s: float = math.inf
    share: float = 0.99
    classes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Limits of TTFT and TPOT by class of requests. They replace `ttft_s` and `tpot_s`."""

    def __post_init__(self) -> None:
        for kind, limits in self.classes.items():
            for name, limit in limits.items():
                if name not in _NAMES[:2] or not limit > 0:
                    raise SimulationError(
                        f"--slo {kind[:100]}:{name[:100]}:{limit:g} must be a limit of ttft or tpot, above 0 seconds"
                    )
        for name in _NAMES:
            if not getattr(self, f"{name}_s") > 0:
                raise SimulationError(f"--slo {name}:{getattr(self, f'{name}_s'):g} must be above 0 seconds")
        if not 0 < self.share <= 1:
            raise SimulationError(f"slo share {self.share:g} must be above 0 and at most 1")

    @classmethod
    def from_text(cls, texts: Sequence[str], share: float = 0.99) -> "Slo":
        """Parse limits in seconds, such as `["ttft:10", "tpot:0.1", "chat:ttft:2"]`.

        `chat:ttft:2` is a limit for requests of the class `chat` only. Raises `SimulationError` for an invalid limit.
        """
        limits: dict[str, float] = {}
        classes: dict[str, dict[str, float]] = {}
        for text in texts:
            rest, _, value = text.rpartition(":")
            kind, colon, name = rest.rpartition(":")
            if name not in _NAMES:
                raise SimulationError(
                    f"--slo {text[:200]!r}: the name must be one of {', '.join(_NAMES)}, as in ttft:10 or chat:ttft:2"
                )
            try:
                limit_s = float(value)
            except ValueError:
                raise SimulationError(f"--slo {text[:200]!r}: {value[:100]!r} must be a number of seconds") from None
            if colon:
                classes.setdefault(kind, {})[name] = limit_s
            else:
                limits[f"{name}_s"] = limit_s
        return cls(**limits, share=share, classes=classes)

    def own(self, name: str, kinds: np.ndarray, kind_names: Sequence[str], others_s: np.ndarray) -> np.ndarray:
        """Return each request's own limit of the latency `name`, in seconds. NaN: the general limit applies.

        Args:
            name: `ttft` or `tpot`.
            kinds: class of each request, as an index into `kind_names`.
            kind_names: names of the classes. A limit of a class applies to all requests of the class.
            others_s: limit that each request sets itself, in place of the limit of its class. NaN: no limit.
        """
        by_kind = np.array([self.classes.get(kind, {}).get(name, math.nan) for kind in kind_names])
        return np.where(np.isnan(others_s), by_kind[kinds], others_s)

    @property
    def limits_s(self) -> dict[str, float]:
        """Finite limits in seconds by name (`ttft`, `tpot`, `e2el`)."""
        return {n: limit for n in _NAMES if math.isfinite(limit := getattr(self, f"{n}_s"))}

    def kept(
        self,
        ttft_s: np.ndarray,
        tpot_s: np.ndarray,
        e2el_s: np.ndarray,
        own_ttft_s: np.ndarray | None = None,
        own_tpot_s: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return a bool for each request: whether it meets all limits. Arrays have one element for each request.

        Args:
            ttft_s: time to first token.
            tpot_s: mean time of each further token. NaN: the request has only one token, which meets any limit.
            e2el_s: seconds from arrival to end.
            own_ttft_s: TTFT limit of the request itself, in place of `self.ttft_s`. NaN: `self.ttft_s` applies.
            own_tpot_s: TPOT limit of the request itself, in place of `self.tpot_s`. NaN: `self.tpot_s` applies.
        """
        tpot_kept = np.isnan(tpot_s) | (tpot_s <= own_limit(own_tpot_s, self.tpot_s))
        return (ttft_s <= own_limit(own_ttft_s, self.ttft_s)) & tpot_kept & (e2el_s <= self.e2el_s)

    def latest_s(
        self, output_len: np.ndarray, own_ttft_s: np.ndarray | None = None, own_tpot_s: np.ndarray | None = None
    ) -> np.ndarray:
        """Return for each request the longest time from arrival to end that its limits allow, in seconds.

        The result is infinite if the limits allow any time.

        Args:
            output_len: number of output tokens of each request.
            own_ttft_s: TTFT limit of each request, as in `kept`.
            own_tpot_s: TPOT limit of each request, as in `kept`.
        """
        more = np.maximum(output_len - 1, 0)
        with np.errstate(invalid="ignore"):  # Infinity times 0: no limit of TPOT, and no second token.
            decoding_s = np.where(more > 0, more * own_limit(own_tpot_s, self.tpot_s), 0.0)
        return np.minimum(own_limit(own_ttft_s, self.ttft_s) + decoding_s, self.e2el_s)


def own_limit(limits_s: np.ndarray | None, default_s: float) -> np.ndarray | float:
    """Return the limit of each request in seconds: its element of `limits_s`, or `default_s` if the element is NaN.

    If `limits_s` is None, return `default_s` as the limit of all requests.
    """
    return default_s if limits_s is None else np.where(np.isnan(limits_s), default_s, limits_s)
