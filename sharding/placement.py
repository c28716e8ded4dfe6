"""Placements: the devices that compute each part of a model, for each microbatch. Pure data, without JAX.

A *module* is the attention of a layer (with its KV cache) or the FFN of a layer. A *home* is an aligned group of
devices that compute modules together. A *microbatch* is a share of the sequences of an instance that travels through
the layers together. A placement has a home for each module and each microbatch, and a home for the head: the embedding
and the output projection. Examples for 30 layers, as `str(placement)` prints them:

    a TP1 instance on device 0            0-29: TP1[0]
    a TP4 instance                        0-29: TP4[0-3]
    four TP1 instances that merge         0-11: TP1[0], TP1[1], TP1[2], TP1[3]   12-29: TP4[0-3]
    layers 5 to 14 replicated             0-4: TP1[0]   5-14: TP1[0], TP1[1]   15-29: TP1[0]
    data-parallel attention, FFNs at TP2  attention 0-29: TP1[0], TP1[1]   ffn 0-29: TP2[0-1]
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby
from typing import Any, Literal

from sharding.errors import LayoutError
from sharding.picture import PICTURE_WIDTH, degree_color, frame, legend, number_step, rectangle

ModuleKind = Literal["layer", "attention", "ffn"]
"""Part of each layer in a run of layers: attention and FFN (`layer`), only attention, or only FFN."""

MAX_STAGES = 4096
"""Maximum number of stages of a placement from JSON."""
MAX_MICROBATCHES = 64


@dataclass(frozen=True, order=True)
class Home:
    """Aligned group of devices that compute modules together: `range(start, start + degree)` of the pool.

    Raises `LayoutError` if `degree` is not a power of two, or `start` is negative or not a multiple of `degree`.
    """

    start: int
    degree: int

    def __post_init__(self) -> None:
        if self.degree < 1 or self.degree & (self.degree - 1):
            raise LayoutError(f"a home of {self.degree} devices is not supported: it must be a power of two")
        if self.start < 0 or self.start % self.degree:
            raise LayoutError(f"a home of {self.degree} devices cannot start at device {self.start}: it is not aligned")

    @classmethod
    def of_devices(cls, devices: Sequence[int]) -> "Home":
        """Return the home with these devices, given as indices in ascending order.

        Raises `LayoutError` if the devices are not an aligned group.
        """
        if not devices or list(devices) != list(range(devices[0], devices[0] + len(devices))):
            raise LayoutError(f"devices {list(devices)} are not consecutive indices, in ascending order")
        return cls(devices[0], len(devices))

    @property
    def devices(self) -> range:
        """Indices of the devices in the pool."""
        return range(self.start, self.start + self.degree)

    def overlaps(self, other: "Home") -> bool:
        """Return whether the two homes share a device.

        If the homes share a device, one home contains the other, because both are aligned.
        """
        return self.start < other.devices.stop and other.start < self.devices.stop

    def contains(self, other: "Home") -> bool:
        """Return whether all devices of the other home belong to this home."""
        return self.start <= other.start and other.devices.stop <= self.devices.stop

    def __str__(self) -> str:
        return f"TP{self.degree}[{_span(self.devices)}]"


Homes = tuple[Home, ...]
"""Homes of one module, one for each microbatch."""


@dataclass(frozen=True)
class Run:
    """Consecutive layers whose modules (attention, FFN) have the same homes.

    Attributes:
        layers: indices of the layers.
        module: modules of these layers that belong to the run: attention and FFN (`layer`), only attention, or only
            FFN.
        homes: homes of the modules, one for each microbatch.
    """

    layers: range
    module: ModuleKind
    homes: Homes

    def __str__(self) -> str:
        name = "" if self.module == "layer" else f"{self.module} "
        homes = dict.fromkeys(self.homes) if len(set(self.homes)) == 1 else self.homes
        return f"{name}{_span(self.layers)}: {', '.join(map(str, homes))}"


@dataclass(frozen=True)
class Placement:
    """Homes (groups of devices) of all modules of one serving instance. A module is the attention or FFN of a layer.

    Attributes:
        head: home of the embedding, the output projection and the sampling state.
        attention: homes of the attention of each layer: one for each microbatch.
        ffn: homes of the FFN of each layer: one for each microbatch.

    Raises `LayoutError` if a module has no home, if modules differ in their number of microbatches, or if different
    homes of one module share devices.
    """

    head: Home
    attention: tuple[Homes, ...]
    ffn: tuple[Homes, ...]

    def __post_init__(self) -> None:
        if not self.attention or len(self.attention) != len(self.ffn):
            raise LayoutError(
                f"a placement of {len(self.attention)} attention and {len(self.ffn)} FFN modules: "
                "every layer needs one of each"
            )
        for name, modules in (("attention", self.attention), ("FFN", self.ffn)):
            for layer, homes in enumerate(modules):
                if len(homes) != self.num_microbatches or not homes:
                    raise LayoutError(
                        f"the {name} of layer {layer} has homes for {len(homes)} microbatches, "
                        f"other modules for {self.num_microbatches}"
                    )
        for name, homes in {(n, h) for n, ms in (("attention", self.attention), ("FFN", self.ffn)) for h in ms}:
            for one, other in combinations(sorted(set(homes)), 2):
                if one.overlaps(other):
                    raise LayoutError(f"a layer's {name} has homes {one} and {other}, which share devices")

    @classmethod
    def uniform(cls, home: Home, num_layers: int, num_microbatches: int = 1) -> "Placement":
        """Return a placement in which one home (group of devices) computes the whole model."""
        homes = ((home,) * num_microbatches,) * num_layers
        return cls(home, homes, homes)

    @classmethod
    def parallel_attention(cls, group: Home, degree: int, num_layers: int) -> "Placement":
        """Return a placement with data-parallel attention.

        `group` is divided into parts of `degree` devices. Each part computes the attention of one microbatch. The whole
        group computes all FFNs, the embedding and the output projection.

        Raises `LayoutError` if parts of `degree` devices are not valid homes.
        """
        parts = tuple(Home(start, degree) for start in range(group.start, group.devices.stop, degree))
        return cls(group, (parts,) * num_layers, ((group,) * len(parts),) * num_layers)

    # Shape

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def num_microbatches(self) -> int:
        return len(self.attention[0])

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Devices that compute any part of the model, in ascending order."""
        homes = {self.head, *(home for homes in (*self.attention, *self.ffn) for home in homes)}
        return tuple(sorted({device for home in homes for device in home.devices}))

    @cached_property
    def home(self) -> Home | None:
        """The home (group of devices) that computes the whole model.

        None if there are several homes or several microbatches.
        """
        only = {self.head, *(home for homes in (*self.attention, *self.ffn) for home in homes)}
        return self.head if len(only) == 1 and self.num_microbatches == 1 else None

    @cached_property
    def attention_degree(self) -> int | None:
        """Tensor-parallel degree of data-parallel attention (`parallel_attention`).

        None: attention is not data-parallel.
        """
        degree = self.attention[0][0].degree
        if degree >= self.head.degree or self.num_microbatches * degree != self.head.degree:
            return None
        return degree if self == Placement.parallel_attention(self.head, degree, self.num_layers) else None

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Runs of modules with equal homes, in the order of computation. Together they cover all modules.

        Consecutive layers form one run if all their modules are at the same homes. If attention and FFN of a layer are
        at different homes, each of the two modules is a separate run.
        """
        parts: list[tuple[int, ModuleKind, Homes]] = []
        for layer, (attention, ffn) in enumerate(zip(self.attention, self.ffn, strict=True)):
            if attention == ffn:
                parts.append((layer, "layer", attention))
            else:
                parts.append((layer, "attention", attention))
                parts.append((layer, "ffn", ffn))
        found: list[Run] = []
        for (module, homes), same in groupby(parts, key=lambda part: (part[1], part[2])):
            layers = [layer for layer, *_ in same]
            if module == "layer":
                found.append(Run(range(layers[0], layers[-1] + 1), module, homes))
            else:
                found += [Run(range(layer, layer + 1), module, homes) for layer in layers]
        return tuple(found)

    def layers_by_home(self, microbatch: int) -> dict[Home, tuple[int, ...]]:
        """Return, for each home (group of devices), the layers whose attention the home computes for `microbatch`."""
        layers: dict[Home, list[int]] = {}
        for layer, homes in enumerate(self.attention):
            layers.setdefault(homes[microbatch], []).append(layer)
        return {home: tuple(of) for home, of in layers.items()}

    def parallelism(self) -> list[int]:
        """Return, for each layer, how many homes compute its attention (the vector P in the paper of CoCoServe)."""
        return [len({*a, *f}) if a == f else len(set(a)) for a, f in zip(self.attention, self.ffn, strict=True)]

    # Changes

    def with_modules(self, layers: range, module: ModuleKind, homes: Homes) -> "Placement":
        """Return a copy of the placement in which `homes` compute some modules of `layers`.

        `module` selects attention, FFN or both.

        Raises `LayoutError` if a layer does not exist, or if the result is not a valid placement.
        """
        names = self._chosen(layers, module)
        return self._replaced(layers, {name: [homes] * len(layers) for name in names})

    def with_head(self, head: Home) -> "Placement":
        """Return a copy of the placement with the embedding and the output projection at `head`."""
        return Placement(head, self.attention, self.ffn)

    def with_microbatches(self, count: int) -> "Placement":
        """Return a copy of the placement with `count` microbatches.

        Microbatch `i` gets the homes of the present microbatch `i * old // count`, where `old` is the present number of
        microbatches.
        """
        old = [number * self.num_microbatches // count for number in range(count)]
        attention, ffn = (tuple(tuple(h[i] for i in old) for h in of) for of in (self.attention, self.ffn))
        return Placement(self.head, attention, ffn)

    def with_layers(self, layers: range, other: "Placement") -> "Placement":
        """Return a copy of the placement in which `layers` have the homes that they have in the placement `other`."""
        homes = {"attention": list(other.attention), "FFN": list(other.ffn)}
        return self._replaced(layers, {name: of[layers.start : layers.stop] for name, of in homes.items()})

    def replicated(self, layers: range, module: ModuleKind, home: Home) -> "Placement":
        """Return a copy of the placement in which `home` also computes some modules of `layers`.

        `module` selects attention, FFN or both.

        The homes of a module share the microbatches as evenly as possible. For example, with 4 microbatches and 2
        homes, the first home computes microbatches 0 and 1. If a module has more homes than there are microbatches, the
        number of microbatches grows to the number of homes.

        Raises `LayoutError` if a layer does not exist, or if a device of `home` already computes one of these modules.
        """
        modules = self._chosen(layers, module)
        for name, homes in modules.items():
            if found := next((h for of in homes for h in of if h.overlaps(home)), None):
                raise LayoutError(f"{found} already computes the {name} of some of the layers {_span(layers)}")
        count = max(self.num_microbatches, *(len(set(h)) + 1 for homes in modules.values() for h in homes))
        changed = {name: [_dealt((*dict.fromkeys(h), home), count) for h in of] for name, of in modules.items()}
        return self.with_microbatches(count)._replaced(layers, changed)

    def evicted(self, layers: range, module: ModuleKind, home: Home) -> "Placement":
        """Return a copy of the placement in which `home` no longer computes some modules of `layers`.

        `module` selects attention, FFN or both. The other homes of a module take over the microbatches of `home`.

        Raises `LayoutError` if a layer does not exist, if a module is not at `home`, or if a module has no other home.
        """

        def without(name: str, homes: Homes) -> Homes:
            left = [h for h in dict.fromkeys(homes) if h != home]
            if home not in homes or not left:
                what = "the only home" if not left else "no home"
                raise LayoutError(f"{home} is {what} of the {name} of some of the layers {_span(layers)}")
            kept = list(homes)
            for number in [number for number, h in enumerate(homes) if h == home]:
                kept[number] = min(left, key=kept.count)
            return tuple(kept)

        modules = self._chosen(layers, module)
        return self._replaced(layers, {name: [without(name, h) for h in of] for name, of in modules.items()})

    def migrated(self, layers: range, module: ModuleKind, home: Home) -> "Placement":
        """Return a copy of the placement in which `home` replaces the first home of some modules of `layers`.

        `module` selects attention, FFN or both. The first home of a module is its home for microbatch 0.

        Raises `LayoutError` if a layer does not exist, or if nothing changes.
        """
        modules = self._chosen(layers, module)
        changed = {name: [tuple(home if h == of[0] else h for h in of) for of in o] for name, o in modules.items()}
        if changed == modules:
            raise LayoutError(f"layers {_span(layers)} are at {home} already")
        return self._replaced(layers, changed)

    def joined(self) -> tuple["Placement", tuple[int, ...]]:
        """Merge microbatches that have the same homes. Return the new placement, and the new index of each microbatch.

        If the new microbatches would replace different numbers of old microbatches, nothing is merged: the homes would
        get other shares of the sequences.
        """
        columns = list(zip(*self.attention, *self.ffn, strict=True))
        kinds = list(dict.fromkeys(columns))
        if len({columns.count(kind) for kind in kinds}) > 1:
            return self, tuple(range(self.num_microbatches))
        first = [columns.index(kind) for kind in kinds]
        attention, ffn = (tuple(tuple(h[i] for i in first) for h in of) for of in (self.attention, self.ffn))
        return Placement(self.head, attention, ffn), tuple(kinds.index(column) for column in columns)

    def _chosen(self, layers: range, module: ModuleKind) -> dict[str, list[Homes]]:
        """Return the homes in each of `layers`, under the keys "attention" and "FFN". `module` selects the keys."""
        if layers.step != 1 or not layers or layers.start < 0 or layers.stop > self.num_layers:
            raise LayoutError(f"layers {_span(layers)} are not among the model's {self.num_layers}")
        every = {"attention": self.attention, "FFN": self.ffn}
        names = {"layer": ("attention", "FFN"), "attention": ("attention",), "ffn": ("FFN",)}[module]
        return {name: list(every[name][layers.start : layers.stop]) for name in names}

    def _replaced(self, layers: range, changed: Mapping[str, list[Homes]]) -> "Placement":
        attention, ffn = list(self.attention), list(self.ffn)
        for name, homes in changed.items():
            (attention if name == "attention" else ffn)[layers.start : layers.stop] = homes
        return Placement(self.head, tuple(attention), tuple(ffn))

    # Data

    @classmethod
    def from_data(cls, data: Any, num_layers: int, num_devices: int, max_degree: int) -> "Placement":
        """Return the placement that parsed JSON describes. `docs/placement.md` has an example.

        Args:
            data: dict with `head` (list of devices) and `stages` (list of dicts). A stage has `layers`, `homes` and
                optionally `module`. `layers` is `[first, end]` and means `range(first, end)`. `homes` has one list of
                devices for each microbatch, or one list for all microbatches.
            num_layers: number of layers of the model.
            num_devices: number of devices of the pool.
            max_degree: largest number of devices of a home.

        Raises `LayoutError` if `data` has another form or exceeds a limit. The message has the value and the limit.
        """
        _check_keys("placement", data, required={"head", "stages"})
        stages = data["stages"]
        if not isinstance(stages, list | tuple) or not 0 < len(stages) <= MAX_STAGES:
            raise LayoutError(f"placement: stages must be a list of 1 to {MAX_STAGES} stages")
        limits = num_devices, max_degree
        head = _home("placement: head", data["head"], *limits)
        parsed = [_stage(index, stage, num_layers, *limits) for index, stage in enumerate(stages)]
        num_microbatches = max(len(run.homes) for run in parsed)
        modules: dict[str, list[Homes | None]] = {"attention": [None] * num_layers, "ffn": [None] * num_layers}
        for index, run in enumerate(parsed):
            if len(run.homes) not in (1, num_microbatches):
                raise LayoutError(
                    f"placement: stage {index} has {len(run.homes)} homes, and another stage has {num_microbatches}: "
                    "give one home for all microbatches, or one for each"
                )
            homes = run.homes * (num_microbatches // len(run.homes))
            for name in ("attention", "ffn") if run.module == "layer" else (run.module,):
                for layer in run.layers:
                    if modules[name][layer] is not None:
                        raise LayoutError(f"placement: stage {index} places the {name} of layer {layer} a second time")
                    modules[name][layer] = homes
        for name, placed in modules.items():
            if None in placed:
                raise LayoutError(f"placement: no stage places the {name} of layer {placed.index(None)}")
        attention, ffn = (tuple(homes for homes in placed if homes is not None) for placed in modules.values())
        return cls(head, attention, ffn)

    def to_dict(self) -> dict[str, Any]:
        """Return the placement as a dict that `from_data` accepts."""
        stages, several = [], any(len(set(run.homes)) > 1 for run in self.runs)
        for run in self.runs:
            # One home stands for all microbatches if another stage tells how many there are.
            homes = run.homes[:1] if several and len(set(run.homes)) == 1 else run.homes
            stage: dict[str, Any] = {"layers": [run.layers.start, run.layers.stop]}
            if run.module != "layer":
                stage["module"] = run.module
            stages.append(stage | {"homes": [list(home.devices) for home in homes]})
        return {"head": list(self.head.devices), "stages": stages}

    def __str__(self) -> str:
        return "   ".join(map(str, self.runs))

    def _repr_html_(self) -> str:
        return _picture(self)


def _picture(placement: Placement) -> str:
    """Return a picture as HTML: a row for each device, a column for each layer, and a last column for the head."""
    left, head_width, top, height, pitch = 72, 28, 6, 26, 34
    width = (PICTURE_WIDTH - left - head_width - 8) / placement.num_layers
    shapes, texts, homes = [], [], {placement.head}
    for row, device in enumerate(placement.devices):
        y = top + row * pitch
        texts.append(f'<text y="{y + 17}">device {device}</text>')
        for layer, modules in enumerate(zip(placement.attention, placement.ffn, strict=True)):
            x, drawn = left + layer * width, []
            for half, of in enumerate(modules):
                if here := next((home for home in of if device in home.devices), None):
                    homes.add(here)
                    drawn.append(rectangle(x, y + half * height / 2, width, height / 2, degree_color(here.degree)))
            names = [", ".join(map(str, dict.fromkeys(of))) for of in modules]
            text = f"layer {layer}\nattention: {names[0]}\nFFN: {names[1]}"
            shapes.append(f"<g><title>{text}</title>{''.join(drawn)}</g>" if drawn else "")
        if device in placement.head.devices:
            title = f"<title>embedding and head: {placement.head}</title>"
            x, color = PICTURE_WIDTH - head_width, degree_color(placement.head.degree)
            shapes.append(f"<g>{title}{rectangle(x, y, head_width, height, color)}</g>")
    bottom = top + len(placement.devices) * pitch + 8
    numbers = "".join(
        f'<text x="{left + (layer + 0.5) * width:.2f}" y="{bottom}">{layer}</text>'
        for layer in range(0, placement.num_layers, number_step(width))
    )
    drawn = (
        f'<g stroke="currentColor" stroke-width=".5" stroke-opacity=".3">{"".join(shapes)}</g>'
        f'{"".join(texts)}<g text-anchor="middle">{numbers}</g>'
        f'<text x="{PICTURE_WIDTH}" y="{bottom}" text-anchor="end">head</text>'
    )
    degrees = sorted({home.degree for home in homes})
    swatches = legend((f"TP{degree}", degree_color(degree), 1.0) for degree in degrees)
    caption = (
        f"{swatches}<br>A row is a device, and a column is a layer: its attention above, its FFN below. Devices with "
        "the same layer share its requests, or compute it together. Point at a layer for its homes."
    )
    return frame("placement", caption, drawn, bottom + 6)


def _dealt(homes: Homes, count: int) -> Homes:
    """Divide `count` microbatches among `homes`, in order. Return the home of each microbatch."""
    return tuple(homes[number * len(homes) // count] for number in range(count))


def _check_keys(what: str, data: Any, required: set[str], optional: Iterable[str] = ()) -> None:
    if not isinstance(data, Mapping):
        raise LayoutError(f"{what} must be an object with {sorted(required)}, not {type(data).__name__}")
    if missing := required - set(data):
        raise LayoutError(f"{what} lacks {sorted(missing)}")
    if unknown := set(data) - required - set(optional):
        raise LayoutError(f"{what} has unknown keys {sorted(map(str, unknown))[:8]}: known are {sorted(required)}")


def _home(what: str, devices: Any, num_devices: int, max_degree: int) -> Home:
    if not isinstance(devices, list | tuple) or not devices or not all(type(device) is int for device in devices):
        raise LayoutError(f"{what} must be a list of device indices, such as [0] or [2, 3]")
    if len(devices) > max_degree:
        raise LayoutError(f"{what} has {len(devices)} devices: a home has at most {max_degree}")
    if not all(0 <= device < num_devices for device in devices):
        raise LayoutError(f"{what} names devices {list(devices)}: there are devices 0 to {num_devices - 1}")
    try:
        return Home.of_devices(devices)
    except LayoutError as error:
        raise LayoutError(f"{what}: {error}") from None


def _stage(index: int, data: Any, num_layers: int, num_devices: int, max_degree: int) -> Run:
    what = f"placement: stage {index}"
    _check_keys(what, data, required={"layers", "homes"}, optional={"module"})
    layers, homes, module = data["layers"], data["homes"], data.get("module", "layer")
    if not isinstance(layers, list | tuple) or len(layers) != 2 or not all(type(layer) is int for layer in layers):
        raise LayoutError(f"{what}: layers must be [first, end), two integers")
    if not 0 <= layers[0] < layers[1] <= num_layers:
        raise LayoutError(f"{what}: layers {list(layers)} must be from 0 to {num_layers}, the first below the end")
    if module not in ("layer", "attention", "ffn"):
        raise LayoutError(f"{what}: module must be layer, attention or ffn")
    if not isinstance(homes, list | tuple) or not 0 < len(homes) <= MAX_MICROBATCHES:
        raise LayoutError(f"{what}: homes must be a list of 1 to {MAX_MICROBATCHES} lists of devices")
    parsed = tuple(_home(f"{what}: home {number}", home, num_devices, max_degree) for number, home in enumerate(homes))
    return Run(range(*layers), module, parsed)


def _span(indices: range) -> str:
    return f"{indices.start}" if len(indices) == 1 else f"{indices.start}-{indices.stop - 1}"
