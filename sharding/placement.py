"""Which devices compute which layers, for which of an instance's sequences. Plain Python, without JAX.

A *home* is an aligned group of devices that computes layers together. A *lane* is a share of an instance's sequences
that always travel together. A *stage* is a run of layers, with the home that computes them for each lane. A *placement*
is the stages of all layers, and the home of the embedding and the head:

    a TP1 instance on device 0        [0, L): (d0,)
    a TP4 instance                    [0, L): (q,)
    four TP1 becoming TP4, half way   [0, k): (d0, d1, d2, d3)   [k, L): (q, q, q, q)
    layers 5 to 14 replicated         [0, 5): (d0, d0)   [5, 15): (d0, d1)   [15, L): (d0, d0)

A change from one placement to another is a `path`: placements that differ in a few layers each, so that whatever fails
leaves an instance at one of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from sharding.errors import LayoutError


@dataclass(frozen=True, order=True)
class Home:
    """Devices `start .. start + degree` of the pool, which compute layers together.

    Raises `LayoutError` unless `degree` is a power of two and `start` a multiple of it.
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
        """Places of its devices in the pool."""
        return range(self.start, self.start + self.degree)

    def overlaps(self, other: "Home") -> bool:
        """Whether they share a device. As both are aligned, one then contains the other."""
        return self.start < other.devices.stop and other.start < self.devices.stop

    def __str__(self) -> str:
        return f"TP{self.degree}[{_named(self.devices)}]"


@dataclass(frozen=True)
class Stage:
    """Consecutive layers that are placed alike.

    Attributes:
        homes: of each lane. Lanes with the same home are computed together. Homes that differ share no device.
    """

    layers: range
    homes: tuple[Home, ...]

    def __post_init__(self) -> None:
        if self.layers.step != 1 or not self.layers:
            raise LayoutError(f"a stage has one layer or more, one after the other: not {self.layers}")
        if not self.homes:
            raise LayoutError(f"layers {_named(self.layers)} have no home")
        for one, other in combinations(self.distinct_homes, 2):
            if one.overlaps(other):
                raise LayoutError(f"layers {_named(self.layers)} have homes {one} and {other}, which share devices")

    @property
    def distinct_homes(self) -> tuple[Home, ...]:
        """Each home once, in the order of their devices."""
        return tuple(sorted(set(self.homes)))

    def lanes(self, home: Home) -> tuple[int, ...]:
        """The lanes that a home computes."""
        return tuple(lane for lane, other in enumerate(self.homes) if other == home)


@dataclass(frozen=True)
class Placement:
    """Where all layers of an instance are computed.

    Stages that are placed alike are one: two placements are equal where every layer has the same homes.

    Attributes:
        ends: home of the embedding and the head, and of what sampling remembers.
        stages: of all layers, from the first to the last.

    Raises `LayoutError` where a layer is missing or there twice, or stages differ in their number of lanes.
    """

    ends: Home
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise LayoutError("a placement needs a stage")
        first = 0
        for stage in self.stages:
            if stage.layers.start != first:
                raise LayoutError(f"layer {first} is expected next, and the stage is of layers {_named(stage.layers)}")
            if len(stage.homes) != self.num_lanes:
                raise LayoutError(
                    f"layers {_named(stage.layers)} have {len(stage.homes)} lanes, others {self.num_lanes}"
                )
            first = stage.layers.stop
        object.__setattr__(self, "stages", _joined(self.stages))

    @classmethod
    def uniform(cls, home: Home, num_layers: int, num_lanes: int = 1) -> "Placement":
        """All layers of all lanes at one home."""
        return cls(home, (Stage(range(num_layers), (home,) * num_lanes),))

    @classmethod
    def of_layers(cls, ends: Home, homes: Sequence[tuple[Home, ...]]) -> "Placement":
        """From the homes of every layer."""
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
        """All devices that take part, in order."""
        homes = {self.ends, *(home for stage in self.stages for home in stage.homes)}
        return tuple(sorted({device for home in homes for device in home.devices}))

    def stage_of(self, layer: int) -> Stage:
        """The stage of a layer. Raises `LayoutError` if there is no such layer."""
        for stage in self.stages:
            if layer in stage.layers:
                return stage
        raise LayoutError(f"there is no layer {layer}: the model has {self.num_layers}")

    def homes(self) -> list[tuple[Home, ...]]:
        """The homes of every layer, one for each lane."""
        return [stage.homes for stage in self.stages for _ in stage.layers]

    def parallelism(self) -> list[int]:
        """Return, for every layer, how many homes compute it side by side: CoCoServe's vector P."""
        return [len(stage.distinct_homes) for stage in self.stages for _ in stage.layers]

    def homes_of(self, lane: int) -> tuple[Home, ...]:
        """The distinct homes that a lane's sequences have pages at, in the order of layers."""
        return tuple(dict.fromkeys(stage.homes[lane] for stage in self.stages))

    def with_lanes(self, num_lanes: int) -> "Placement":
        """The same placement for more lanes of the same homes. Raises `LayoutError` unless it has a lane alone."""
        if self.num_lanes not in (1, num_lanes):
            raise LayoutError(f"a placement of {self.num_lanes} lanes cannot have {num_lanes}")
        return Placement(
            self.ends,
            tuple(Stage(s.layers, s.homes * (num_lanes // self.num_lanes)) for s in self.stages),
        )

    def with_homes(self, layers: range, homes: tuple[Home, ...]) -> "Placement":
        """The placement with some layers at other homes."""
        if not layers or layers.start < 0 or layers.stop > self.num_layers:
            raise LayoutError(f"layers {_named(layers)} are not among the model's {self.num_layers}")
        before = [Stage(r, s.homes) for s in self.stages if (r := s.layers[: max(layers.start - s.layers.start, 0)])]
        after = [Stage(r, s.homes) for s in self.stages if (r := s.layers[max(layers.stop - s.layers.start, 0) :])]
        return Placement(self.ends, (*before, Stage(layers, homes), *after))

    def with_ends(self, ends: Home) -> "Placement":
        """The placement with the embedding and the head at another home."""
        return Placement(ends, self.stages)

    def __str__(self) -> str:
        return "  ".join(f"{_named(s.layers)}: {', '.join(map(str, s.homes))}" for s in self.stages)


def joined(placements: Sequence[Placement], ends: Home) -> Placement:
    """Placements of instances side by side as one: the lanes of the first, then of the second, and so on.

    Raises `LayoutError` where they share devices or differ in their number of layers.
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
    """The way from one placement to another: which layers change next, and the placement with them changed.

    Layers that are the same in both are left alone. A step is of consecutive layers, `layers_per_step` at most, which
    come from one stage and go to one. The ends are at the larger of their two homes all the way, and at the target's
    with the last step: that has no layers where only the ends differ.

    Args:
        last_first: begin with the last layers.

    Raises `LayoutError` where the two differ in layers or lanes (see `with_lanes`), or the home of the ends of one
    does not contain that of the other.
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
    """The layers that change, in order, in runs of at most `layers_per_step` that change alike."""
    changes = enumerate(zip(source.homes(), target.homes(), strict=True))
    for (before, after), run in groupby(changes, key=lambda change: change[1]):
        layers = [layer for layer, _ in run]
        if before != after:
            for first in range(layers[0], layers[-1] + 1, layers_per_step):
                yield range(first, min(first + layers_per_step, layers[-1] + 1))


def _joined(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """With neighbours that have the same homes as one."""
    found: list[Stage] = []
    for homes, alike in groupby(stages, key=lambda stage: stage.homes):
        first, *more = alike
        found.append(Stage(range(first.layers.start, more[-1].layers.stop), homes) if more else first)
    return tuple(found)


def _named(layers: range) -> str:
    return f"{layers.start}" if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"
