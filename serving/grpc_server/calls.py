"""A request as every protocol puts it, and the limits of one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server.callers import Caller

Prompt = str | list[int] | list[dict[str, Any]]
"""A text, token ids, or a conversation."""


@dataclass(frozen=True)
class Call:
    """A request as every protocol puts it.

    Attributes:
        name: the id that the client has given it, "" for none. Only replies, traces and `Abort` have it: within the
            server a request has an id of its own.
        timeout_s: how long it may take from now on; None: no limit.
        num_bytes: size of its message, and of what its reply repeats of that.
        unique_name: refuse it while another of its caller's requests has its name.
        trace_headers: `traceparent` and `tracestate` of W3C Trace Context, as far as the client sent them.
    """

    name: str
    prompt: Prompt
    params: SamplingParams
    caller: Caller
    timeout_s: float | None = None
    num_bytes: int = 0
    cache_salt: str = ""
    unique_name: bool = True
    trace_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def salt(self) -> str | None:
        """What separates its cached prefixes from those of others: the caller's own, and the one that it sent."""
        if not self.caller.salt:
            return self.cache_salt or None
        return f"{self.caller.salt}/{self.cache_salt}"
