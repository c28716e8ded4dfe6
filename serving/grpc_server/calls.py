"""Generation request of a client, in a form that is the same for all protocols."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from amoeba_jax.sampling_params import SamplingParams
from serving.grpc_server.callers import Caller


@dataclass(frozen=True)
class Chat:
    """Conversation, and arguments of the model's chat template.

    Attributes:
        messages: messages in the form of Hugging Face's chat templates.
        tools: descriptions of functions that the model may call, in OpenAI's form.
        settings: further arguments of `Tokenizer.apply_chat_template`.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)


Prompt = str | list[int] | Chat
"""A text, token ids, or a conversation."""


@dataclass(frozen=True)
class Call:
    """Generation request of a client, in a form that is the same for all protocols.

    Attributes:
        name: id that the client chose. "": the client chose no id. Replies, traces and `Abort` use this id. Inside the
            server, the request has another id, which no client can choose.
        prompt: text, token ids or conversation.
        params: sampling settings.
        caller: identity of the client.
        timeout_s: time limit of the request in seconds. None: no limit.
        num_bytes: number of bytes that count against the client's limit. These are the bytes of the request message,
            and of all copies of the prompt in the reply.
        cache_salt: salt of the prefix cache that the client sent, or "".
        unique_name: whether to refuse the request if another unfinished request of the caller has the same `name`.
        add_special_tokens: whether the tokenizer may put its BOS token before a text prompt.
        with_tokens: function that gets the token ids of the prompt, and returns the final sampling settings. It may
            change only `max_tokens`. None: `params` are final.
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
    add_special_tokens: bool = True
    with_tokens: Callable[[list[int]], SamplingParams] | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def salt(self) -> str | None:
        """Salt of the prefix cache: `caller.salt` and `cache_salt` together. None if both are empty."""
        if not self.caller.salt:
            return self.cache_salt or None
        return f"{self.caller.salt}/{self.cache_salt}"
