"""Placements (devices that compute each layer) in the form that policies and metrics use."""

from collections import Counter
from collections.abc import Sequence

from serving.scheduler import LayerSizes, PlacementView
from serving.scheduler.cocoserve.speedup import count_transitions, even_speedup
from sharding.placement import Homes, Placement


def layers_by_device(placement: Placement) -> Counter[int]:
    """Return for each device the number of layers whose attention or FFN it computes."""
    return Counter(
        device
        for attention, ffn in zip(placement.attention, placement.ffn, strict=True)
        for device in {device for home in (*attention, *ffn) for device in home.devices}
    )


def placement_view(placement: Placement, devices: Sequence[int]) -> PlacementView | None:
    """Return the devices that compute each layer, in the form that policies use.

    Return None if all layers are on `devices`, the devices of the instance.
    """
    if placement.home is not None and tuple(placement.home.devices) == tuple(devices):
        return None
    attention = tuple(_devices(homes) for homes in placement.attention)
    ffn = tuple(_devices(homes) for homes in placement.ffn)
    if set(attention) == set(ffn) == {tuple(devices)}:
        return None
    return PlacementView(attention, ffn)


def estimated_speedup(placement: Placement) -> float:
    """Return how many times faster a step is with the replicated layers of a placement (Equation 4 of CoCoServe).

    Without replicated layers, it is 1.
    """
    modules = [homes for pair in zip(placement.attention, placement.ffn, strict=True) for homes in pair]
    transitions = count_transitions([_devices(homes) for homes in modules], tuple(placement.head.devices))
    return even_speedup(placement.parallelism(), transitions, LayerSizes.transition_cost)


def _devices(homes: Homes) -> tuple[int, ...]:
    return tuple(sorted({device for home in homes for device in home.devices}))
