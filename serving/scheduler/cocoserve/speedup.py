"""Speed-up of an instance with replicated layers: Equations 1 to 4 of the CoCoServe paper.

The homes of a layer are the devices that compute it. Each home computes a share of the batch. If consecutive layers
have different homes, hidden states move between devices. This move is a *transition*. There can also be a transition
after the embedding and before the output projection.
"""

import itertools
from collections.abc import Iterable, Sequence

Homes = tuple[int, ...]
"""Devices that compute one layer, in ascending order."""


def computation_s(loads: Iterable[Sequence[float]], speeds: Iterable[Sequence[float]]) -> float:
    """Return the seconds of computation in one step with replicated layers (Equation 1).

    A layer takes as long as the slowest of the devices that compute it (its homes). The time of a home is its load
    divided by its speed.

    Args:
        loads: number of operations (FLOP) of each layer at each of its homes, for the home's share of the batch.
        speeds: operations per second (FLOP/s) of each layer's homes.
    """
    return sum(
        max(load / speed for load, speed in zip(layer_loads, layer_speeds, strict=True))
        for layer_loads, layer_speeds in zip(loads, speeds, strict=True)
    )


def count_transitions(homes: Sequence[Homes], head: Homes) -> int:
    """Return how often the hidden states move between devices in one step.

    Args:
        homes: devices that compute each layer.
        head: devices of the embedding and the output projection, where each step begins and ends.
    """
    places = [head, *homes, head]
    return sum(before != after for before, after in itertools.pairwise(places))


def communication_s(num_bytes: float, transitions: int, bandwidth: float) -> float:
    """Return the seconds in which hidden states move between devices in one step (Equation 2).

    Args:
        num_bytes: bytes of hidden states in one move.
        transitions: number of moves in a step (`count_transitions`).
        bandwidth: bytes per second between two devices.
    """
    return num_bytes * transitions / bandwidth


def speedup(sequential_s: float, computation_s: float, communication_s: float) -> float:
    """Return the factor by which replicated layers speed up one step (Equation 3).

    Args:
        sequential_s: seconds of the step if no layer is replicated.
        computation_s: seconds of computation with replicas (Equation 1).
        communication_s: seconds of communication with replicas (Equation 2).
    """
    return sequential_s / (computation_s + communication_s)


def even_speedup(parallelism: Sequence[int], transitions: int, transition_cost: float) -> float:
    """Return the factor by which replicated layers speed up one step on equal devices (Equation 4).

    Each device of a layer computes an equal share of the batch. For `n` layers, the result is `n / (sum of 1 / p_i +
    transition_cost * transitions)`.

    Args:
        parallelism: number of devices `p_i` that compute layer `i` (the vector P of the paper).
        transitions: number of moves of hidden states between devices in a step (`count_transitions`).
        transition_cost: time of one move divided by the time of one layer, from the function `transition_cost`.
    """
    return len(parallelism) / (sum(1 / p for p in parallelism) + transition_cost * transitions)


def transition_cost(num_bytes: float, bandwidth: float, latency_s: float, layer_s: float) -> float:
    """Return the time of one transition divided by the time of one layer: the constant of Equation 4.

    In a transition, hidden states move between devices.

    Args:
        num_bytes: bytes of hidden states in one transition.
        bandwidth: bytes per second between two devices.
        latency_s: seconds that any transfer takes, in addition to `num_bytes / bandwidth`.
        layer_s: seconds of one layer with the whole batch on one device.
    """
    return (latency_s + num_bytes / bandwidth) / layer_s
