"""How many layers change their home between two steps."""

from typing import Literal, TypeAlias

LayersPerStep: TypeAlias = int | Literal["auto"]

_WAIT_SHARE = 0.2
"""Share of a step by which switches may make it longer: no token waits for more than 1.25 steps, with some to spare."""


class SwitchRates:
    """What switches have moved beside a step without making it too long, by direction, over the life of an engine."""

    def __init__(self) -> None:
        self._bytes_per_step_s: dict[bool, float] = {}

    def limit(self, up: bool, step_s: float) -> float:
        """Bytes that a step of that duration bears; 0 if nothing is known of a direction."""
        return self._bytes_per_step_s.get(up, 0.0) * step_s

    def bore(self, up: bool, num_bytes: float, step_s: float) -> None:
        """A step of that duration has borne that many bytes."""
        self._bytes_per_step_s[up] = max(num_bytes / step_s, self._bytes_per_step_s.get(up, 0.0))

    def set_limit(self, up: bool, num_bytes: float, step_s: float) -> None:
        """More bytes than these would make a step of that duration too long."""
        self._bytes_per_step_s[up] = num_bytes / step_s


class SwitchPace:
    """The pace of one transition.

    `auto` begins with one segment, as requests may have waited for others to end a step by then. After that it takes
    as many layers as are known to be bearable, and at most twice as many as the time before. It follows what steps take
    behind their switches: devices differ, and so do steps during a transition.

    Args:
        layers_per_step: what was asked for. `auto`: as many as keep the longest wait for a token under 1.25 steps.
        step_s: duration of a decode step before; None if there was none.
        rates: of the engine's switches.

    Attributes:
        behind_step: bytes of the switches that the next step is launched behind.
    """

    def __init__(self, layers_per_step: LayersPerStep, step_s: float | None, rates: SwitchRates, *, up: bool):
        self._layers_per_step, self._step_s, self._rates, self._up = layers_per_step, step_s, rates, up
        self._limit = 0.0 if step_s is None else rates.limit(up, step_s)
        self._latest_bytes = 0
        self._extra_s = 0.0
        self.behind_step = 0

    def num_layers(self, layer_bytes: int) -> int:
        """Layers to switch before the next step, one of which moves that many bytes; at least one."""
        if isinstance(self._layers_per_step, int):
            return self._layers_per_step
        if not layer_bytes:
            return 1 << 30  # a matter of views
        return max(1, int(min(self._limit, 2 * self._latest_bytes) / layer_bytes))

    def switched(self, num_bytes: int) -> None:
        """Take note of switches that were launched."""
        self.behind_step = self._latest_bytes = num_bytes
        if self._step_s is None:  # nothing says what is too long
            self._limit = 2.0 * num_bytes

    def step_taken(self, seconds: float, num_bytes: int) -> None:
        """Take note of a decode step during the transition that was launched behind switches of that many bytes."""
        if self._step_s is None or not num_bytes:
            return
        # The launch of a later switch may have kept its result waiting.
        num_bytes = max(num_bytes, self._latest_bytes)
        latest_s, bearable_s = seconds - self._step_s, _WAIT_SHARE * self._step_s
        extra_s, self._extra_s = max(latest_s, self._extra_s), latest_s
        self._limit = num_bytes * (min(bearable_s / extra_s, 2.0) if extra_s > 0 else 2.0)
        if extra_s <= bearable_s:
            self._rates.bore(self._up, num_bytes, self._step_s)
        else:
            self._rates.set_limit(self._up, self._limit, self._step_s)
