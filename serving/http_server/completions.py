"""Endpoint `/v1/completions` of OpenAI's API."""

import time
import uuid
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from amoeba_jax.outputs import CompletionDelta, RequestDelta
from amoeba_jax.sampling_params import SamplingParams
from amoeba_jax.shorten import shorten
from serving.grpc_server.calls import Call
from serving.grpc_server.field_limits import check_length, check_reply_entries
from serving.grpc_server.request_handler import RequestHandler
from serving.http_server.errors import FieldError, json_response
from serving.http_server.fields import (
    UNSUPPORTED,
    Penalties,
    Sampling,
    check_names,
    check_stream,
    read_body,
    refuse_unsupported,
    sampling_params,
)
from serving.http_server.streams import DONE, EventStream, Write, event, serve_all, while_connected
from serving.http_server.usage import CompletionLogprobs, Usage, prompt_entry

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(Sampling, Penalties):
    """Body of a request to `/v1/completions`."""

    prompt: Any = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    suffix: str | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None


def completion_routes(handler: RequestHandler) -> APIRouter:
    """Return the HTTP routes of completions."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        completion = _Completion(handler, body, request)
        if body.stream:
            return EventStream(completion.stream, completion.headers)
        answer: dict[str, Any] = {}
        await while_connected(request.receive, completion.whole(answer))
        return json_response(answer, headers=completion.headers)

    return routes


@dataclass
class _Sample:
    """Output so far of one choice of a reply. A streamed reply keeps no text here."""

    logprobs: CompletionLogprobs | None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    has_begun: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Completion:
    """Request of `/v1/completions` that is being served. Each of its prompts is a separate request to the engine."""

    def __init__(self, handler: RequestHandler, body: CompletionRequest, request: Request):
        handler.check_model(body.model)
        limits = handler.limits
        check_names(body, limits)
        check_stream(body)
        refuse_unsupported(body, {**UNSUPPORTED, "suffix": ("",), "best_of": (body.n or 1,)})
        caller = request.scope["caller"]
        self._handler, self._body = handler, body
        self.id = f"cmpl-{body.request_id or uuid.uuid4().hex}"
        self.headers = {"x-request-id": self.id}
        self._created = int(time.time())
        prompts = _prompts(body.prompt, limits.max_prompts)
        for prompt in prompts:
            size = len(prompt)
            if isinstance(prompt, str):
                check_length("the prompt", size, "max_prompt_chars", limits, "characters")
            else:
                handler.check_num_tokens("the prompt", size)
        # `max_tokens=0` asks for the log-probabilities of the prompt only: one token is generated, and not sent.
        self._drops_text = body.max_tokens == 0
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1
        wanted = (body.prompt_logprobs, body.logprobs if body.echo else None)
        params = sampling_params(
            body,
            limits,
            caller,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=max((it for it in wanted if it is not None), default=None),
        )
        self._params = params
        self._prompts: list[list[int]] = [[] for _ in prompts]
        self._prompt_texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        special = body.add_special_tokens is not False
        self._calls = [
            Call(
                name=body.request_id or "",
                prompt=prompt,
                params=params,
                caller=caller,
                timeout_s=limits.max_http_s,
                cache_salt=body.cache_salt or "",
                unique_name=index == 0,
                with_tokens=partial(self._take_tokens, index),
                add_special_tokens=special,
                trace_headers={
                    key: value for key in ("traceparent", "tracestate") if (value := request.headers.get(key))
                },
            )
            for index, prompt in enumerate(prompts)
        ]
        self._samples = [
            _Sample(
                None
                if body.logprobs is None
                else CompletionLogprobs(body.logprobs, bool(body.return_tokens_as_token_ids))
            )
            for _ in range(len(prompts) * params.n)
        ]
        self._usage = Usage(len(prompts))
        self._prompt_logprobs: list[list[Any]] = [[] for _ in prompts]
        self._num_entries = self._num_repeated = self._num_echoed_bytes = 0

    def _take_tokens(self, index: int, tokens: list[int]) -> SamplingParams:
        self._prompts[index] = tokens
        body, limits, num_samples = self._body, self._handler.limits, self._params.n
        if body.echo:
            text = self._prompt_texts[index]
            if text is None:
                text = self._prompt_texts[index] = self._handler.tokenizer().decode(tokens, False)
            self._num_echoed_bytes += num_samples * len(text.encode(errors="replace"))
            check_length("the echo of the prompts", self._num_echoed_bytes, "max_echo_bytes", limits, "bytes")
        if body.echo or body.return_token_ids or body.prompt_logprobs is not None:
            self._num_repeated += num_samples * len(tokens) * (1 + (self._params.prompt_logprobs or 0))
            name = "the part of the reply that repeats the prompts"
            check_length(name, self._num_repeated, "max_reply_entries", limits, "tokens and log-probabilities")
        return self._params

    async def whole(self, answer: dict[str, Any]) -> None:
        """Generate all output, and put the fields of the reply into `answer`."""

        async def send(index: int, delta: RequestDelta) -> None:
            self._num_entries += delta.num_tokens * (1 + (self._params.logprobs or 0))
            check_reply_entries(self._num_entries + self._num_repeated, self._handler.limits)
            for choice in self._choices(index, delta):
                sample = self._samples[choice["index"]]
                sample.text.append(choice["text"])
                sample.token_ids += choice["token_ids"]
                if choice["logprobs"] is not None:
                    sample.parts.append(choice["logprobs"])

        await serve_all(self._handler, self._calls, send)
        choices = []
        for number, sample in enumerate(self._samples):
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            logprobs = {name: [it for part in sample.parts for it in part[name]] for name in names}
            choice = {
                "index": number,
                "text": "".join(sample.text),
                "logprobs": None if sample.logprobs is None else logprobs,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "prompt_logprobs": None,
            }
            prompt = number // self._params.n
            if self._body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = [*map(prompt_entry, self._prompt_logprobs[prompt])]
            if self._body.return_token_ids:
                choice |= {"token_ids": sample.token_ids, "prompt_token_ids": self._prompts[prompt]}
            choices.append(choice)
        answer.update(self._head(), choices=choices, usage=self._usage.to_dict())

    async def stream(self, write: Write) -> None:
        """Generate the output, and write an event for each new part."""
        options = self._body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        continuous = wants_usage and options is not None and bool(options.continuous_usage_stats)
        head = self._head()

        async def send(index: int, delta: RequestDelta) -> None:
            chunks = []
            for choice in self._choices(index, delta):
                if not (choice["text"] or choice["logprobs"] or choice["finish_reason"] or self._body.return_token_ids):
                    continue
                if not self._body.return_token_ids:
                    del choice["token_ids"]
                chunk = head | {"choices": [choice]}
                if wants_usage:
                    chunk["usage"] = self._usage.to_dict() if continuous else None
                chunks.append(event(chunk))
            if chunks:
                await write(b"".join(chunks))

        await serve_all(self._handler, self._calls, send)
        end = event(head | {"choices": [], "usage": self._usage.to_dict()}) if wants_usage else b""
        await write(end + DONE)

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._handler.backend.name,
        }

    def _choices(self, index: int, delta: RequestDelta) -> list[dict[str, Any]]:
        """Return the new output of prompt number `index` as choices of a reply."""
        if self._drops_text:
            delta = replace(delta, completions=tuple(map(_without_text, delta.completions)))
        self._usage.add(index, delta)
        self._prompt_logprobs[index] += delta.prompt_logprobs
        return [self._choice(index, completion) for completion in delta.completions]

    def _choice(self, index: int, completion: CompletionDelta) -> dict[str, Any]:
        number = index * self._params.n + completion.index
        sample = self._samples[number]
        # As in vLLM, a stop token has an entry: lm-eval drops the last entry after an echo.
        entries = [
            (token, options[token].decoded_token or "", options)
            for token, options in zip(completion.token_ids, completion.logprobs or (), strict=False)
        ]
        text, built = completion.text, None
        if self._body.echo and not sample.has_begun:
            text = (self._prompt_texts[index] or "") + text
            entries = self._prompt_entries(index) + entries
        sample.has_begun = True
        if sample.logprobs is not None and entries:
            built = sample.logprobs.build(entries)
        sample.finish_reason, sample.stop_reason = completion.finish_reason, completion.stop_reason
        return {
            "index": number,
            "text": text,
            "logprobs": built,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": list(completion.token_ids),
        }

    def _prompt_entries(self, index: int) -> list[tuple[int, str, Any]]:
        """Return the tokens of prompt number `index` with their log-probabilities, if the request asks for them."""
        if self._body.logprobs is None:
            return []
        text = self._handler.tokenizer().token_text
        return [
            (token, text(token), options)
            for token, options in zip(self._prompts[index], self._prompt_logprobs[index], strict=False)
        ]


def _without_text(completion: CompletionDelta) -> CompletionDelta:
    reason = None if completion.finish_reason is None else "length"
    return CompletionDelta(completion.index, "", (), None, None, reason, None)


def _prompts(prompt: Any, most: int) -> list[str | list[int]]:
    """Return the list of prompts in a request body.

    Raises `FieldError` for a wrong type, no prompt, or more than `most` prompts.
    """
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_token(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise FieldError("prompt", f"must be a text, token ids, or a list of either, got {shorten(prompt)}")
    if len(prompt) > most:
        raise FieldError("prompt", f"has {len(prompt)} prompts: at most {most} may be given (max_prompts)")
    for index, it in enumerate(prompt):
        if isinstance(it, str) and it:
            continue
        if not isinstance(it, list) or not it or not all(map(_is_token, it)):
            raise FieldError(f"prompt[{index}]", f"must be a text or token ids, and not empty, got {shorten(it)}")
    return prompt


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
