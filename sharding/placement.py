"""Placement of layers on devices, for each share of the sequences of an instance. Plain Python, without JAX.

A *home* is an aligned group of devices that computes layers together. A *lane* is a group of sequences of an instance
that are always computed together. A *stage* is a range of layers with a home for each lane. A *placement* consists of
the stages of all layers, and of the home of the embedding and the head:

    a TP1 instance on device 0        [0, L): (d0,)
    a TP4 instance                    [0, L): (q,)
    four TP1 becoming TP4, half way   [0, k): (d0, d1, d2, d3)   [k, L): (q, q, q, q)
    layers 5 to 14 replicated         [0, 5): (d0, d0)   [5, 15): (d0, d1)   [15, L): (d0, d0)

A change from one placement to another is a `path`: a list of placements, each of which differs in a few layers from the
one before. After a failure the instance is therefore at a valid placement.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from sharding.errors import LayoutError


@dataclass(frozen=True, order=True)
class Home:
    """Devices `start .. start + degree` of the pool, which compute layers together.

    Raises `LayoutError` if `degree` is not a power of two, or `start` is not a multiple of `degree`.
    """

    start: int
    degree: int

    def __post_init__(self) -> None:
        if self.degree < 1 or self.degree & (self.degree - 1):
            raise LayoutError(f"a home of {self.degree} devices is not supported: it must be a power of two")
        if self.start < 0 or self.start % self.degree:
            raise LayoutError(f"a home of {self.degree} devices cannot start at device {self.start}: it is not aligned")

    @property
    def devices(self) -> range:
        """Indices of the devices in the pool."""
        return range(self.start, self.start + self.degree)

    def overlaps(self, other: "Home") -> bool:
        """Return whether the homes share a device. One then contains the other, because both are aligned."""
        return self.start < other.devices.stop and other.start < self.devices.stop

    def __str__(self) -> str:
        return f"TP{self.degree}[{_named(self.devices)}]"


@dataclass(frozen=True)
class Stage:
    """Consecutive layers with the same homes.

    Attributes:
        layers: range of layers.
        homes: home of each lane. Lanes with equal homes are computed together. Different homes share no device.

    Raises `LayoutError` if there is no layer or no home, or if different homes share devices.
    """

    layers: range
    homes: tuple[Home, ...]

    def __post_init__(self) -> None:
        if self.layers.step != 1 or not self.layers:
            raise LayoutError(f"a stage needs one or more consecutive layers, not {self.layers}")
        if not self.homes:
            raise LayoutError(f"layers {_named(self.layers)} have no home")
        for one, other in combinations(self.distinct_homes, 2):
            if one.overlaps(other):
                raise LayoutError(f"layers {_named(self.layers)} have homes {one} and {other}, which share devices")

    @property
    def distinct_homes(self) -> tuple[Home, ...]:
        """Homes without duplicates, in the order of their devices."""
        return tuple(sorted(set(self.homes)))

    def lanes(self, home: Home) -> tuple[int, ...]:
        """Return the lanes that a home computes."""
        return tuple(lane for lane, other in enumerate(self.homes) if other == home)


@dataclass(frozen=True)
class Placement:
    """Homes of all layers of an instance.

    Adjacent stages with the same homes are merged, so placements are equal if every layer has the same homes.

    Attributes:
        ends: home of the embedding, the head and the sampling state.
        stages: stages of all layers, in order.

    Raises `LayoutError` if a layer is missing or occurs twice, or if stages have different numbers of lanes.
    """

    ends: Home
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise LayoutError("a placement needs at least one stage")
        first = 0
        for stage in self.stages:
            if stage.layers.start != first:
                raise LayoutError(f"the next stage must start at layer {first}, not at {stage.layers.start}")
            if len(stage.homes) != self.num_lanes:
                raise LayoutError(
                    f"layers {_named(stage.layers)} have {len(stage.homes)} lanes, others {self.num_lanes}"
                )
            first = stage.layers.stop
        object.__setattr__(self, "stages", _joined(self.stages))

    @classmethod
    def uniform(cls, home: Home, num_layers: int, num_lanes: int = 1) -> "Placement":
        """Place all layers of all lanes at one home."""
        return cls(home, (Stage(range(num_layers), (home,) * num_lanes),))

    @classmethod
    def of_layers(cls, ends: Home, homes: Sequence[tuple[Home, ...]]) -> "Placement":
        """Build a placement from the homes of every layer."""
        stages, first = [], 0
        for of_lanes, run in groupby(homes):
            end = first + sum(1 for _ in run)
            stages.append(Stage(range(first, end), of_lanes))
            first = end
        return cls(ends, tuple(stages))

    @property
    def num_layers(self) -> int:
        return self.stages[-1].layers.stop

    @property
    def num_lanes(self) -> int:
        return len(self.stages[0].homes)

    @property
    def devices(self) -> tuple[int, ...]:
        """Indices of all devices of the placement, in order."""
        homes = {self.ends, *(home for stage in self.stages for home in stage.homes)}
        return tuple(sorted({device for home in homes for device in home.devices}))

    def stage_of(self, layer: int) -> Stage:
        """Return the stage of a layer. Raises `LayoutError` if there is no such layer."""
        for stage in self.stages:
            if layer in stage.layers:
                return stage
        raise LayoutError(f"there is no layer {layer}: the model has {self.num_layers}")

    def homes(self) -> list[tuple[Home, ...]]:
        """Return the homes of every layer, one for each lane."""
        return [stage.homes for stage in self.stages for _ in stage.layers]

    def parallelism(self) -> list[int]:
        """Return the number of homes that compute each layer in parallel: the vector P of CoCoServe."""
        return [len(stage.distinct_homes) for stage in self.stages for _ in stage.layers]

    def homes_of(self, lane: int) -> tuple[Home, ...]:
        """Return the homes of a lane without duplicates, in the order of layers. Its sequences have pages at each."""
        return tuple(dict.fromkeys(stage.homes[lane] for stage in self.stages))

    def with_lanes(self, num_lanes: int) -> "Placement":
        """Return the placement with `num_lanes` copies of its only lane. Raises `LayoutError` if it has more lanes."""
        if self.num_lanes not in (1, num_lanes):
            raise LayoutError(f"a placement of {self.num_lanes} lanes cannot have {num_lanes}")
        return Placement(
            self.ends,
            tuple(Stage(s.layers, s.homes * (num_lanes // self.num_lanes)) for s in self.stages),
        )

    def with_homes(self, layers: range, homes: tuple[Home, ...]) -> "Placement":
        """Return the placement with some layers at other homes. Raises `LayoutError` for unknown layers."""
        if not layers or layers.start < 0 or layers.stop > self.num_layers:
            raise LayoutError(f"layers {_named(layers)} are not among the model's {self.num_layers}")
        before = [Stage(r, s.homes) for s in self.stages if (r := s.layers[: max(layers.start - s.layers.start, 0)])]
        after = [Stage(r, s.homes) for s in self.stages if (r := s.layers[max(layers.stop - s.layers.start, 0) :])]
        return Placement(self.ends, (*before, Stage(layers, homes), *after))

    def with_ends(self, ends: Home) -> "Placement":
        """Return the placement with the embedding and the head at another home."""
        return Placement(ends, self.stages)

    def __str__(self) -> str:
        return "  ".join(f"{_named(s.layers)}: {', '.join(map(str, s.homes))}" for s in self.stages)


def joined(placements: Sequence[Placement], ends: Home) -> Placement:
    """Join the placements of several instances: the lanes of the first, then the lanes of the second, and so on.

    Raises `LayoutError` if they share devices or have different numbers of layers.
    """
    if len({placement.num_layers for placement in placements}) != 1:
        raise LayoutError("placements of different models cannot be joined")
    for one, other in combinations(placements, 2):
        if set(one.devices) & set(other.devices):
            raise LayoutError(f"placements share devices {sorted(set(one.devices) & set(other.devices))}")
    layers = zip(*(placement.homes() for placement in placements), strict=True)
    return Placement.of_layers(ends, [tuple(home for homes in layer for home in homes) for layer in layers])


def path(
    source: Placement, target: Placement, layers_per_step: int, *, last_first: bool = True
) -> Iterator[tuple[range, Placement]]:
    """Yield the steps from one placement to another: the layers of the step, and the placement after it.

    Only layers with different homes change. A step changes at most `layers_per_step` consecutive layers, which are in
    one stage before and in one stage afterwards. The ends are at the larger of their two homes until the last step,
    which moves them to their target. If only the ends differ, this step has no layers.

    Args:
        source: first placement; not yielded.
        target: last placement.
        layers_per_step: maximum number of layers in a step.
        last_first: True begins with the last layers, False with the first.

    Raises `LayoutError` if the placements have different numbers of layers or lanes (see `with_lanes`), or if neither
    home of the ends contains the other.
    """
    if (source.num_layers, source.num_lanes) != (target.num_layers, target.num_lanes):
        raise LayoutError(
            f"no path from {source.num_layers} layers and {source.num_lanes} lanes to "
            f"{target.num_layers} and {target.num_lanes}"
        )
    if layers_per_step < 1:
        raise LayoutError(f"layers_per_step={layers_per_step} must be at least 1")
    if not source.ends.overlaps(target.ends):
        raise LayoutError(f"the ends cannot go from {source.ends} to {target.ends}: neither contains the other")
    steps = list(_steps(source, target, layers_per_step))
    if last_first:
        steps.reverse()
    present = source.with_ends(max(source.ends, target.ends, key=lambda home: home.degree))
    for layers in steps[:-1]:
        present = present.with_homes(layers, target.stage_of(layers.start).homes)
        yield layers, present
    if steps:
        yield steps[-1], target
    elif source.ends != target.ends:
        yield range(0), target


def _steps(source: Placement, target: Placement, layers_per_step: int) -> Iterator[range]:
    """Yield the layers that change, in order, in ranges of at most `layers_per_step` with equal old and new homes."""
    changes = enumerate(zip(source.homes(), target.homes(), strict=True))
    for (before, after), run in groupby(changes, key=lambda change: change[1]):
        layers = [layer for layer, _ in run]
        if before != after:
            for first in range(layers[0], layers[-1] + 1, layers_per_step):
                yield range(first, min(first + layers_per_step, layers[-1] + 1))


def _joined(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Merge adjacent stages with equal homes."""
    found: list[Stage] = []
    for homes, alike in groupby(stages, key=lambda stage: stage.homes):
        first, *more = alike
        found.append(Stage(range(first.layers.start, more[-1].layers.stop), homes) if more else first)
    return tuple(found)


def _named(layers: range) -> str:
    return f"{layers.start}" if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"
