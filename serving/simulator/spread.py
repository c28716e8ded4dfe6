"""Spread of an instance: the devices that compute its layers, and the cost of its steps there.

A module is a part of a layer: the attention with its KV cache, or the FFN. The homes of a module are the devices that
compute it. Each home computes an equal share of the batch at the same time. If two consecutive modules have different
homes, hidden states move between devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from serving.scheduler import LayerSizes, PlacementView
from serving.scheduler.cocoserve.speedup import Homes, count_transitions
from serving.simulator.pricing import Pricing
from serving.simulator.step_cost import StepShape


@dataclass(frozen=True)
class LayerCost:
    """Sizes and rates for the cost of placement changes, and for the cost of steps if layers are on several devices."""

    sizes: LayerSizes
    device_bytes: float
    """Bytes of a device for weights and KV cache."""
    row_bytes: float
    """Bytes of the hidden state of one token."""
    link_rate: float
    """Bytes per second from one device to another."""
    host_rate: float
    """Bytes per second between a device and host memory."""
    launch_s: float
    """Seconds of the shortest transfer."""

    def hop_s(self, rows: int) -> float:
        """Return the seconds to move the hidden states of `rows` tokens between devices."""
        return self.launch_s + rows * self.row_bytes / self.link_rate


@dataclass(frozen=True)
class Spread:
    """Devices that compute the modules (attention and FFN of each layer) of an instance of degree 1.

    Attributes:
        own: device of the instance, with the embedding and the output projection.
        attention: devices that compute the attention of each layer.
        ffn: devices that compute the FFN of each layer.
        cost: costs of transfers, and sizes of a layer.
        kept: layers whose attention weights stay on `own`, although other devices compute their attention.
    """

    own: int
    attention: tuple[Homes, ...]
    ffn: tuple[Homes, ...]
    cost: LayerCost
    kept: frozenset[int] = frozenset()

    @classmethod
    def at_home(cls, device: int, cost: LayerCost) -> "Spread":
        """Return the spread of an instance whose own device computes all its layers."""
        homes = ((device,),) * cost.sizes.num_layers
        return cls(device, homes, homes, cost)

    @property
    def is_home(self) -> bool:
        """Whether the instance's own device alone computes all layers of the instance."""
        return self.devices == {self.own}

    @cached_property
    def devices(self) -> frozenset[int]:
        """Devices that compute at least one module of the instance, and the instance's own device."""
        return frozenset(device for home in (*self.attention, *self.ffn, (self.own,)) for device in home)

    @property
    def view(self) -> PlacementView | None:
        """Placement of the layers in the form that policies use.

        None if all layers are on the instance's own device.
        """
        return None if self.is_home else PlacementView(self.attention, self.ffn)

    @cached_property
    def _groups(self) -> tuple[tuple[Homes, float, float], ...]:
        """Work of a step: `(devices, fixed, attention)` for each set of devices that computes modules together.

        `attention` is the set's share (0 to 1) of the attention operators of all layers. `fixed` is the set's share
        of all other work. A layer's other work is divided between its two modules in proportion to their weight bytes.
        """
        sizes, shares = self.cost.sizes, {}
        attention_share = sizes.attention_bytes / sizes.weight_bytes / sizes.num_layers
        for homes, fixed, context in (
            *((homes, attention_share, 1 / sizes.num_layers) for homes in self.attention),
            *((homes, 1 / sizes.num_layers - attention_share, 0.0) for homes in self.ffn),
        ):
            before = shares.get(homes, (0.0, 0.0))
            shares[homes] = (before[0] + fixed, before[1] + context)
        return tuple((homes, *both) for homes, both in shares.items())

    @cached_property
    def transitions(self) -> int:
        """Number of places in a step where hidden states move between devices."""
        modules = [home for both in zip(self.attention, self.ffn, strict=True) for home in both]
        return count_transitions(modules, (self.own,))

    @cached_property
    def time_shares(self) -> Mapping[int, float]:
        """For each device, the share of a step's time with computation, if no other instance delays the step."""
        return {d: sum(fixed for homes, fixed, _ in self._groups if d in homes) for d in self.devices}

    @cached_property
    def cache_shares(self) -> Mapping[int, float]:
        """For each device, the mean bytes of KV cache for one token of the instance."""
        kv_bytes = self.cost.sizes.kv_token_bytes
        return {d: kv_bytes * sum(1 / len(home) for home in self.attention if d in home) for d in self.devices}

    def weight_layers(self, device: int) -> tuple[frozenset[int], frozenset[int]]:
        """Return `(attention, ffn)`: the layers whose attention or FFN weights the instance needs on a device."""
        attention = {i for i, home in enumerate(self.attention) if device in home}
        ffn = frozenset(i for i, home in enumerate(self.ffn) if device in home)
        return frozenset(attention | (self.kept if device == self.own else set())), ffn

    def step_s(
        self,
        pricing: Pricing,
        shape: StepShape,
        context: float,
        pairs: float,
        crowding: Mapping[int, float],
    ) -> float:
        """Return the seconds of a step.

        The homes of a module divide the decoding sequences, but one home computes all prompt chunks.

        Args:
            pricing: costs of a step on one device.
            shape: contents of the step.
            context: total tokens of the decoding sequences.
            pairs: attention pairs of the prompt chunks (`Pricing.pairs`).
            crowding: for each device, the factor by which other instances slow it down.
        """
        seconds = self.transitions * self.cost.hop_s(shape.decodes + shape.prompt_tokens)
        for homes, fixed, attention in self._groups:
            part = shape._replace(decodes=-(-shape.decodes // len(homes)))
            own_s = fixed * pricing.fixed_s(1, part)
            attention_s = pricing.attention_s(1, shape.decodes / len(homes), context / len(homes))
            own_s += attention * (attention_s + pricing.pair_s(1) * pairs)
            seconds += own_s * max(crowding.get(device, 1.0) for device in homes)
        return seconds

    def slope_s(self, pricing: Pricing, decodes: int, context: float, crowding: Mapping[int, float]) -> float:
        """Return the seconds by which each step with `decodes` decoding sequences is longer than the step before.

        The other arguments are as in `step_s`.
        """
        return sum(
            attention
            * pricing.attention_slope_s(1, decodes, context)
            / len(homes)
            * max(crowding.get(device, 1.0) for device in homes)
            for homes, _, attention in self._groups
        )

    def moved(self, layers: range, modules: str, homes: Sequence[Homes]) -> "Spread":
        """Return a copy in which other devices compute modules of some layers.

        Args:
            layers: layers to move.
            modules: parts of these layers that move, as in `Migrate.modules`.
            homes: for each of these layers, the devices that compute the parts from now on.
        """
        new = dict(zip(layers, homes, strict=True))
        attention, ffn, kept = self.attention, self.ffn, set(self.kept) - set(layers)
        if modules != "ffn":
            attention = tuple(new.get(i, home) for i, home in enumerate(attention))
        if modules in ("layer", "ffn"):
            ffn = tuple(new.get(i, home) for i, home in enumerate(ffn))
        if modules == "kv":
            kept |= set(layers)
        return Spread(self.own, attention, ffn, self.cost, frozenset(kept))
