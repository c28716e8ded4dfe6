"""Result of a check of `amoeba doctor`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Result of one check of this machine.

    Attributes:
        status: "ok", "warn" (a feature may not work or runs slowly) or "fail" (a feature does not work).
        detail: facts that the check found.
        advice: action for the user.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""
