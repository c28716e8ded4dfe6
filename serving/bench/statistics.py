"""Mean, median, standard deviation and percentiles, with vLLM's names."""

from collections.abc import Sequence

import numpy as np


def statistics(
    name: str, values_s: Sequence[float] | np.ndarray, percentiles: Sequence[float]
) -> dict[str, float | None]:
    """Return `mean_<name>_ms`, `median_<name>_ms`, `std_<name>_ms` and `p<percentile>_<name>_ms` of values in seconds.
    Each result is None if there are no values."""
    values_ms = np.array(values_s) * 1000
    keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std")]
    keys += [f"p{percentile:g}_{name}_ms" for percentile in percentiles]
    if not len(values_ms):
        return dict.fromkeys(keys)
    figures = [values_ms.mean(), np.median(values_ms), values_ms.std(), *np.percentile(values_ms, percentiles)]
    return {key: float(value) for key, value in zip(keys, figures, strict=True)}
