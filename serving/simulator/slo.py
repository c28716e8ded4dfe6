"""Service-level objectives: limits of latencies that each request must keep."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serving.simulator.errors import SimulationError

_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Slo:
    """Limits in seconds; infinity for none. A simulation keeps it if at least `share` of its requests do."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2el_s: float = math.inf
    share: float = 0.99

    def __post_init__(self) -> None:
        for name in _NAMES:
            if not getattr(self, f"{name}_s") > 0:
                raise SimulationError(f"--slo {name}:{getattr(self, f'{name}_s'):g} must be above 0 seconds")
        if not 0 < self.share <= 1:
            raise SimulationError(f"slo share {self.share:g} must be above 0 and at most 1")

    @classmethod
    def from_text(cls, texts: Sequence[str], share: float = 0.99) -> "Slo":
        """From `["ttft:10", "tpot:0.1"]`, in seconds. Raises `SimulationError`."""
        limits: dict[str, float] = {}
        for text in texts:
            name, _, value = text.partition(":")
            if name not in _NAMES:
                raise SimulationError(f"--slo {text!r}: it may have {', '.join(_NAMES)}, such as ttft:10")
            try:
                limits[f"{name}_s"] = float(value)
            except ValueError:
                raise SimulationError(f"--slo {text!r}: {value!r} must be a number of seconds") from None
        return cls(**limits, share=share)

    @property
    def limits_s(self) -> dict[str, float]:
        """The limits that are set, in seconds by name."""
        return {n: limit for n in _NAMES if math.isfinite(limit := getattr(self, f"{n}_s"))}

    def kept(
        self,
        ttft_s: np.ndarray,
        tpot_s: np.ndarray,
        e2el_s: np.ndarray,
        own_ttft_s: np.ndarray | None = None,
        own_tpot_s: np.ndarray | None = None,
    ) -> np.ndarray:
        """Which requests keep all limits. Requests without a second token keep any TPOT.

        Args:
            own_ttft_s, own_tpot_s: limits of single requests, which win; NaN for none.
        """
        tpot_kept = np.isnan(tpot_s) | (tpot_s <= _own(own_tpot_s, self.tpot_s))
        return (ttft_s <= _own(own_ttft_s, self.ttft_s)) & tpot_kept & (e2el_s <= self.e2el_s)

    def latest_s(
        self, output_len: np.ndarray, own_ttft_s: np.ndarray | None = None, own_tpot_s: np.ndarray | None = None
    ) -> np.ndarray:
        """Seconds from its arrival within which a request that keeps all limits has ended; infinity if they do not say.

        Args:
            output_len: tokens that each request generates.
            own_ttft_s, own_tpot_s: as in `kept`.
        """
        more = np.maximum(output_len - 1, 0)
        with np.errstate(invalid="ignore"):  # no limit of TPOT, and no second token
            decoding_s = np.where(more > 0, more * _own(own_tpot_s, self.tpot_s), 0.0)
        return np.minimum(_own(own_ttft_s, self.ttft_s) + decoding_s, self.e2el_s)


def _own(limits_s: np.ndarray | None, default_s: float) -> np.ndarray | float:
    return default_s if limits_s is None else np.where(np.isnan(limits_s), default_s, limits_s)
