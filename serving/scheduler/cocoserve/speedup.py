"""Speed-up of an instance whose layers are replicated: Equations 1 to 4 of CoCoServe.

The homes of a layer are the devices that compute it. Each home computes a share of the batch. A *transition* is a place
in the model where homes change: between two layers, after the embedding, or before the head. Hidden states move between
devices there.
"""

import itertools
from collections.abc import Iterable, Sequence

Homes = tuple[int, ...]
"""Devices that compute one layer, in ascending order."""


def computation_s(loads: Iterable[Sequence[float]], speeds: Iterable[Sequence[float]]) -> float:
    """Return the seconds of computation of one step (Equation 1).

    Each layer takes as long as its slowest home. The time of a home is its load divided by its speed.

    Args:
        loads: operations (FLOP) of each layer at each of its homes. They grow with the home's share of the batch.
        speeds: operations per second (FLOP/s) of each layer's homes.
    """
    return sum(
        max(load / speed for load, speed in zip(layer_loads, layer_speeds, strict=True))
        for layer_loads, layer_speeds in zip(loads, speeds, strict=True)
    )


def count_transitions(homes: Sequence[Homes], head: Homes) -> int:
    """Return the number of transitions in one step.

    Args:
        homes: homes of each layer.
        head: home of the embedding and the head, where each step begins and ends.
    """
    places = [head, *homes, head]
    return sum(before != after for before, after in itertools.pairwise(places))


def communication_s(num_bytes: float, transitions: int, bandwidth: float) -> float:
    """Return the seconds of communication of one step (Equation 2).

    Args:
        num_bytes: bytes of hidden states that one transition moves.
        transitions: result of `count_transitions`.
        bandwidth: bytes per second between two devices.
    """
    return num_bytes * transitions / bandwidth


def speedup(sequential_s: float, computation_s: float, communication_s: float) -> float:
    """Return the speed-up of one step (Equation 3), without a unit.

    Args:
        sequential_s: seconds of the step if no layer is replicated.
        computation_s: seconds of computation with replicas (Equation 1).
        communication_s: seconds of communication with replicas (Equation 2).
    """
    return sequential_s / (computation_s + communication_s)


def even_speedup(parallelism: Sequence[int], transitions: int, transition_cost: float) -> float:
    """Return the speed-up of one step on equal devices with an evenly divided batch (Equation 4), without a unit.

    This is `n / (sum of 1 / p_i + transition_cost * transitions)` for `n` layers.

    Args:
        parallelism: number of homes `p_i` of each layer: the vector P.
        transitions: result of `count_transitions`.
        transition_cost: result of `transition_cost`: the constant of Equation 4.
    """
    return len(parallelism) / (sum(1 / p for p in parallelism) + transition_cost * transitions)


def transition_cost(num_bytes: float, bandwidth: float, latency_s: float, layer_s: float) -> float:
    """Return the cost of one transition relative to one layer: the constant of Equation 4, without a unit.

    Args:
        num_bytes: bytes of hidden states that one transition moves.
        bandwidth: bytes per second between two devices.
        latency_s: seconds of the shortest transfer.
        layer_s: seconds of one layer with the whole batch on one device.
    """
    return (latency_s + num_bytes / bandwidth) / layer_s
