"""Result of a check of `amoeba doctor`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: name of the check.
        status: "fail" if a feature does not work, "warn" if it may not work or runs slower, else "ok".
        detail: facts that the check found.
        advice: action for the user.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""
