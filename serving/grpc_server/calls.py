"""A generation request, independent of the protocol that it came by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server.callers import Caller

Prompt = str | list[int] | list[dict[str, Any]]
"""A text, token ids, or a conversation."""


@dataclass(frozen=True)
class Call:
    """A generation request.

    Attributes:
        name: id that the client chose, or "". Replies, traces and `Abort` use it. Inside the server a request has
            another id, which no client can choose.
        prompt: text, token ids or conversation.
        params: sampling settings.
        caller: identity of the client.
        timeout_s: seconds that the request may take from now on. None: no limit.
        num_bytes: size of the request message, plus the parts of it that the reply repeats.
        cache_salt: salt that the client sent, or "".
        unique_name: whether to refuse the request while another request of the caller has the same name.
        trace_headers: `traceparent` and `tracestate` of W3C Trace Context, if the client sent them.
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
        """Salt of cached prefixes: the salt of the caller's token and the salt that the client sent. None: no salt."""
        if not self.caller.salt:
            return self.cache_salt or None
        return f"{self.caller.salt}/{self.cache_salt}"
