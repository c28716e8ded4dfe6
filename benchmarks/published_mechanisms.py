"""Cost models of other systems, compared with the numbers of their papers."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from paper_rows import CALIBRATED, PREDICTED, Row

from serving.simulator.comparators import LayerExchangeCost, SequenceParallelCost, ShiftCost
from serving.simulator.device_spec import find_device
from serving.simulator.memory import MemoryPlan
from serving.simulator.model_shape import ModelShape
from serving.simulator.step_cost import ModelStepCost, StepCost, StepShape, prompt_pairs


def prompt_s(cost: StepCost, degree: int, prompts: int, tokens: int) -> float:
    """Return the seconds of a step that computes `prompts` whole prompts of `tokens` tokens."""
    shape = StepShape(0, prompts, prompts * tokens, tokens)
    return cost.fixed_s(degree, shape) + cost.pair_s(degree) * prompts * prompt_pairs(0, tokens)


def decode_s(cost: StepCost, degree: int, sequences: int, tokens: int) -> float:
    """Return the seconds of a decode step of `sequences` sequences, each with a context of `tokens` tokens."""
    return cost.fixed_s(degree, StepShape(sequences)) + cost.context_s(degree) * sequences * tokens


def shift_parallelism(llama_70b: ModelShape) -> Iterable[Row]:
    """Return rows of arXiv 2509.16495: TTFT of a 4K prompt, Llama-70B in FP8 on 8 H200.

    The rate of FP8 products is fitted to the row of data parallelism, in which one device computes alone. The other
    rows follow from this rate and the modelled communication.
    """
    prompt, data_parallel_s = 4096, 0.614

    def at(share: float) -> ModelStepCost:
        device = replace(find_device("H200"), flops=1979e12, flops_efficiency=share)
        return ModelStepCost(llama_70b, device)

    shares = np.linspace(0.2, 0.9, 701)
    base = at(float(shares[np.argmin([abs(prompt_s(at(s), 1, 1, prompt) - data_parallel_s) for s in shares])]))
    where = "Shift Parallelism, 4K prompts in FP8"
    yield Row(where, "TTFT at DP (ms)", 614, prompt_s(base, 1, 1, prompt) * 1e3, "calibrated on this row")
    yield Row(where, "TTFT at TP8 (ms)", 159, prompt_s(base, 8, 1, prompt) * 1e3, CALIBRATED)
    yield Row(where, "TTFT of Shift Parallelism (ms)", 102, prompt_s(ShiftCost(base), 8, 1, prompt) * 1e3, CALIBRATED)


FIGURE_3 = {
    (512, 1_000): ((7757.4, 38.87), (5775.6, 42.55), (5267.1, 42.25)),
    (128, 5_000): ((10157.0, 37.76), (7694.3, 40.34), (7071.8, 41.37)),
    (64, 10_000): ((10791.9, 36.38), (8306.2, 38.15), (7701.1, 40.14)),
    (16, 50_000): ((19506.5, 42.93), (16595.0, 44.92), (15744.4, 45.89)),
    (4, 100_000): ((13546.3, 26.36), (12147.0, 28.03), (11798.4, 28.91)),
    (1, 500_000): ((51135.5, 37.58), (51699.9, 41.61), (53605.9, 37.79)),
}
"""LoongServe Figure 3: prefill and decode times in ms at TP8, SP2 x TP4 and SP4 x TP2, by batch and length.

The figure shows times relative to TP8. The values here are from the authors' notebook
(test/longserve/3-data-analyse-intro.ipynb of github.com/LoongServe/LoongServe).
"""
MASTERS = {(512, 1_000): (2, 4), (128, 5_000): (1, 2), (64, 10_000): (1, 2)}
"""Numbers of masters (see `SequenceParallelCost`) for SP2 and SP4 in the notebook, by batch and length. Default: 1."""


def figure_3_ratios(llama_7b: ModelShape) -> dict[str, list[tuple[float, float]]]:
    """Return published and simulated times of sequence parallelism, divided by the times at TP8.

    The result has pairs (published, simulated) for each phase, `prefill` and `decode`. In each phase, every entry of
    `FIGURE_3` has two pairs: one for SP2 and one for SP4.
    """
    device = find_device("A800")
    base = ModelStepCost(llama_7b, device)
    found: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    for (batch, length), (at_tp8, *others) in FIGURE_3.items():
        whole = prompt_s(base, 8, batch, length), decode_s(base, 8, batch, length)
        for parts, masters, measured in zip((2, 4), MASTERS.get((batch, length), (1, 1)), others, strict=True):
            cost = SequenceParallelCost(base, tensor_degree=8 // parts, masters=masters)
            own = prompt_s(cost, parts, batch, length), decode_s(cost, parts, batch, length)
            for place, phase in enumerate(found):
                found[phase].append((measured[place] / at_tp8[place], own[place] / whole[place]))
    return found


def loongserve(llama_7b: ModelShape) -> Iterable[Row]:
    """Return rows of arXiv 2404.09526, Figure 3: LWM-1M-Text on 8 A800. The model has the sizes of Llama-2-7B."""
    for phase, pairs in figure_3_ratios(llama_7b).items():
        paper, own = (float(np.mean(column)) for column in zip(*pairs, strict=True))
        worst = max(abs(twin / measured - 1) for measured, twin in pairs)
        what = f"{phase} at SP x TP over TP8, mean of 12 points, at most {worst:.0%} apart"
        yield Row("LoongServe Figure 3", what, paper, own, PREDICTED)


RDMA_BYTES_PER_S = 25e9
"""Bytes per second of a network of 200 Gbit/s."""
RDMA_EFFICIENCY = 0.7
"""Assumed share of this rate that transfers reach."""


def exchange_s(qwen_14b: ModelShape) -> float:
    """Return the seconds in which two devices with full caches exchange the keys and values of half of their layers."""
    device = replace(find_device("A800"), link_bandwidth=RDMA_BYTES_PER_S, link_efficiency=RDMA_EFFICIENCY)
    tokens = 2 * MemoryPlan(qwen_14b, device).capacity_tokens(1)
    return LayerExchangeCost(qwen_14b, device).change(1, 2, tokens).seconds(qwen_14b.num_layers)


def kunserve(qwen_14b: ModelShape) -> Iterable[Row]:
    """Return rows of arXiv 2412.18169, section 5.3: Qwen-2.5-14B on A800 with a network of 200 Gbit/s."""
    yield Row("KunServe 5.3", "exchange of KV when two instances drop (s)", 1.3, exchange_s(qwen_14b), PREDICTED)
