"""Mean, median, standard deviation and percentiles, with vLLM's names."""

from collections.abc import Sequence

import numpy as np


def statistics(
    name: str, values_s: Sequence[float] | np.ndarray, percentiles: Sequence[float]
) -> dict[str, float | None]:
    """Return mean, median, standard deviation and percentiles of values, in milliseconds.

    The keys are vLLM's names, such as `mean_ttft_ms`. If there are no values, each result is None.

    Args:
        name: name of the metric, such as "ttft".
        values_s: values in seconds.
        percentiles: percentiles to compute, from 0 to 100.
    """
    values_ms = np.array(values_s) * 1000
    keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std")]
    keys += [f"p{percentile:g}_{name}_ms" for percentile in percentiles]
    if not len(values_ms):
        return dict.fromkeys(keys)
    figures = [values_ms.mean(), np.median(values_ms), values_ms.std(), *np.percentile(values_ms, percentiles)]
    return {key: float(value) for key, value in zip(keys, figures, strict=True)}
