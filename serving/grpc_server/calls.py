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
        name: id that the client chose; "" if the client chose no id. Replies, traces and `Abort` use this id. Inside
            the server, the request has another id, which no client can choose.
        prompt: text, token ids or conversation.
        params: sampling settings.
        caller: identity of the client.
        timeout_s: time limit of the request in seconds. None: no limit.
        num_bytes: size of the request message in bytes, plus the bytes of the prompt that the reply repeats.
        cache_salt: salt that the client sent, or "".
        unique_name: whether to refuse the request if another unfinished request of the caller has the same `name`.
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
        """Salt of cached prefixes, made of the salt of the caller and `cache_salt`. None: both salts are empty."""
        if not self.caller.salt:
            return self.cache_salt or None
        return f"{self.caller.salt}/{self.cache_salt}"
