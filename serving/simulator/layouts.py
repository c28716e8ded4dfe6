"""Names of fixed layouts, such as `static-tp4` and `static:tp4x1+tp1x4`.

A layout is the tensor-parallel degree of each instance of a host.
"""

import re
from collections.abc import Sequence

from serving.scheduler import DegreeLimits, is_policy_file
from serving.simulator.errors import DoesNotFitError, SimulationError

STATIC = ("static-tp1", "static-tp2", "static-tp4", "static-tp8", "static-mixed")
PARTS_OF = ("static", "disaggregated")
"""Policies whose name may list the parts of a layout."""
_PART = re.compile(r"tp(\d{1,4})x(\d{1,4})")
_MAX_PARTS = 16


def is_static(name: str) -> bool:
    """Return whether a policy is static: it never merges or splits instances.

    With a static policy, all weights of an instance are divided over its devices.
    """
    return name in STATIC or name == "disaggregated" or read_parts(name) is not None


def read_parts(name: str) -> tuple[tuple[int, ...], ...] | None:
    """Return the tensor-parallel degrees of the instances in a name such as `static:tp4x1+tp1x4`.

    The result has the degrees for each part between plus signs, here `((4,), (1, 1, 1, 1))`. The result is None if the
    name has no parts. Raises `SimulationError` if the parts are invalid.
    """
    policy, colon, text = name.partition(":")
    if not colon or is_policy_file(name):
        return None
    texts = text.split("+")
    found = [_PART.fullmatch(part) for part in texts]
    parts = tuple((int(match[1]),) * int(match[2]) for match in found if match)
    valid = len(parts) == len(texts) <= _MAX_PARTS and all(parts)
    if not valid or any(part[0] < 1 or part[0] & (part[0] - 1) for part in parts):
        raise SimulationError(
            f"policy {name[:100]!r}: {text[:60]!r} must be parts such as tp4x1+tp1x4 (one instance TP4 and four TP1), "
            f"at most {_MAX_PARTS}, with powers of two as degrees"
        )
    if policy not in PARTS_OF or (policy == "disaggregated" and len(parts) != 2):
        raise SimulationError(
            f"policy {name[:100]!r}: only static:PARTS and disaggregated:PREFILL+DECODE list the parts of a layout"
        )
    return parts


def degrees_at_start(name: str, devices: int, limits: Sequence[DegreeLimits]) -> tuple[int, ...]:
    """Return the tensor-parallel degrees of a policy's instances at the start, in the order of devices.

    Raises `DoesNotFitError` if the model does not fit at a degree that the policy needs, or if the policy needs another
    number of devices.
    """
    fitting = [limit.degree for limit in limits]
    known = f"on {devices} device{'s' if devices > 1 else ''} the model fits only at TP{', TP'.join(map(str, fitting))}"
    if (parts := read_parts(name)) is not None:
        degrees = sum(parts, ())
        if missing := next((degree for degree in degrees if degree not in fitting), None):
            raise DoesNotFitError(f"policy {name!r} needs TP{missing}, but {known}")
        if sum(degrees) != devices:
            raise DoesNotFitError(f"policy {name!r} needs {sum(degrees)} devices, but a scheduler has {devices}")
        return degrees
    if name == "static-mixed":
        largest = max((degree for degree in fitting if degree <= devices // 2), default=fitting[0])
        if largest == fitting[0]:
            raise DoesNotFitError(f"policy {name!r} needs instances of two degrees, but {known}")
        return (largest,) + (fitting[0],) * _whole(devices - largest, fitting[0])
    if name.startswith("static-tp"):
        degree = int(name.removeprefix("static-tp"))
        if degree not in fitting:
            raise DoesNotFitError(f"policy {name!r} needs TP{degree}, but {known}")
        return (degree,) * _whole(devices, degree)
    degree = fitting[-1] if name == "shift" else fitting[0]
    if name == "disaggregated" and devices < 2 * degree:
        raise DoesNotFitError(f"policy {name!r} needs two instances, but {known}")
    return (degree,) * _whole(devices, degree)


def num_prefill(name: str, degrees: Sequence[int]) -> int:
    """Return the number of instances that compute prompts only. It is 0 for all policies except `disaggregated`.

    For `disaggregated:tp2x1+tp1x6`, it is the number of instances in the first part, here 1. For `disaggregated`, it is
    half of the instances. `degrees` has the degree of each instance at the start.
    """
    if not name.startswith("disaggregated"):
        return 0
    parts = read_parts(name)
    return len(degrees) // 2 if parts is None else len(parts[0])


def _whole(devices: int, degree: int) -> int:
    """Return `devices / degree`. Raises `DoesNotFitError` if the division has a remainder."""
    if devices % degree:
        raise DoesNotFitError(f"{devices} devices are not a multiple of {degree}: an instance needs TP{degree}")
    return devices // degree
