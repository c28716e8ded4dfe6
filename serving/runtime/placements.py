"""Placements (devices that compute each layer) in the form that policies and metrics use."""

from collections import Counter
from collections.abc import Sequence

from serving.scheduler import LayerSizes, PlacementView
from serving.scheduler.cocoserve.speedup import count_transitions, even_speedup
from sharding.placement import Homes, Placement


def layers_by_device(placement: Placement) -> Counter[int]:
    """Return the number of layers that each device computes.

    A layer counts if the device computes the attention or the FFN of the layer.
    """
    return Counter(
        device
        for attention, ffn in zip(placement.attention, placement.ffn, strict=True)
        for device in {device for home in (*attention, *ffn) for device in home.devices}
    )


def placement_view(placement: Placement, devices: Sequence[int]) -> PlacementView | None:
    """Return the devices that compute each layer of an instance, in the form that policies use.

    `devices` are the instance's own devices. If all layers are on these devices, return None.
    """
    if placement.home is not None and tuple(placement.home.devices) == tuple(devices):
        return None
    attention = tuple(_devices(homes) for homes in placement.attention)
    ffn = tuple(_devices(homes) for homes in placement.ffn)
    if set(attention) == set(ffn) == {tuple(devices)}:
        return None
    return PlacementView(attention, ffn)


def estimated_speedup(placement: Placement) -> float:
    """Return the factor by which the replicas of a placement should speed up a step (Equation 4 of CoCoServe).

    The factor is relative to a placement with all layers on one home. Moves of hidden states between homes reduce the
    factor.
    """
    modules = [homes for pair in zip(placement.attention, placement.ffn, strict=True) for homes in pair]
    transitions = count_transitions([_devices(homes) for homes in modules], tuple(placement.head.devices))
    return even_speedup(placement.parallelism(), transitions, LayerSizes.transition_cost)


def _devices(homes: Homes) -> tuple[int, ...]:
    return tuple(sorted({device for home in homes for device in home.devices}))
