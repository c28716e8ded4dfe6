"""What a check of `amoeba doctor` finds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. `fail`: something would not work; `warn`: might not, or runs worse."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""
