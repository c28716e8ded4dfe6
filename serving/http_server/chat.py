"""Endpoint `/v1/chat/completions` of OpenAI's API."""

import inspect
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from transformers import PreTrainedTokenizerFast

from amoeba_jax import StructuredOutput
from amoeba_jax.shorten import shorten
from serving.grpc_server.field_limits import check_reply_entries
from serving.grpc_server.request_handler import RequestHandler
from serving.http_server.chat_generation import ChatGeneration, Step
from serving.http_server.conversation import read_messages, read_tools
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
from serving.http_server.output_parser import Piece
from serving.http_server.streams import DONE, EventStream, Write, event, while_connected
from serving.http_server.usage import chat_logprobs, prompt_entry

# Arguments of the tokenizer that clients may not set through `chat_template_kwargs`.
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) | {"messages"}
_MAX_TEMPLATE_ARGUMENTS = 64


class TemplateFields(Sampling):
    """Fields of a request body that are arguments of the chat template."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Any = None


class ChatRequest(TemplateFields, Penalties):
    """Body of a request to `/v1/chat/completions`."""

    messages: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    verbosity: str | None = None
    prediction: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    moderation: Any = None
    echo: bool | None = None


_UNSUPPORTED_HERE: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    "chat_template": (),
    "documents": ([],),
    "modalities": ([], ["text"]),
    "audio": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "moderation": (),
    "echo": (False,),
}


def chat_routes(handler: RequestHandler) -> APIRouter:
    """Return the HTTP routes of chat completions."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        chat = _ChatCompletion(handler, body, request)
        if body.stream:
            return EventStream(chat.stream, chat.headers)
        answer: dict[str, Any] = {}
        await while_connected(request.receive, chat.whole(answer))
        return json_response(answer, headers=chat.headers)

    return routes


def template_settings(body: Any, effort: str | None) -> dict[str, Any]:
    """Return the arguments of `Tokenizer.apply_chat_template` that a request body sets.

    `effort` is the reasoning effort of the request, or None. Raises `FieldError` for values that are not allowed.
    """
    arguments = dict(body.chat_template_kwargs or {})
    if len(arguments) > _MAX_TEMPLATE_ARGUMENTS:
        raise FieldError("chat_template_kwargs", f"has over {_MAX_TEMPLATE_ARGUMENTS} entries, got {len(arguments)}")
    if reserved := sorted(_RESERVED & set(arguments)):
        raise FieldError("chat_template_kwargs", f"must not have {reserved[0]!r}")
    if effort is not None:
        arguments.setdefault("reasoning_effort", effort)
        if effort == "none":
            arguments.setdefault("enable_thinking", False)
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and opens:
        raise FieldError("continue_final_message", "cannot be true together with add_generation_prompt")
    return {"add_generation_prompt": opens, "continue_final_message": continues, "arguments": arguments}


# Fields by type. In a response, the format itself holds the schema. The schema of a JSON object is an extension of
# llama.cpp and others.
_FORMAT_FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("type",),
    "json_object": ("type", "schema"),
    "json_schema": ("type", "json_schema", "name", "description", "schema", "strict"),
}


def read_format(value: Any, name: str = "response_format") -> StructuredOutput | None:
    """Convert a response format of OpenAI's API to a constraint on the generated text. None: any text is allowed.

    `name` is the path of the format in the request, for errors. Raises `FieldError` if the format is not supported.
    """
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    known: tuple[str, ...] = _FORMAT_FIELDS.get(kind if isinstance(kind, str) else "", ())
    if not known:
        raise FieldError(f"{name}.type", f"must be text, json_object or json_schema, got {shorten(kind)}")
    _check_keys(value, known, name)
    if kind == "text":
        return None
    if kind == "json_object" and value.get("schema") is None:
        return StructuredOutput(json_object=True)
    inner, path = value, f"{name}.schema"
    if "json_schema" in value:
        inner, path = value["json_schema"], f"{name}.json_schema.schema"
        if isinstance(inner, Mapping):
            _check_keys(inner, _FORMAT_FIELDS["json_schema"][2:], f"{name}.json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping | bool):
        raise FieldError(path, f"must be a JSON schema, got {shorten(schema)}")
    return StructuredOutput(json_schema=schema)  # type: ignore[arg-type]


def _check_keys(value: Mapping[str, Any], known: Collection[str], name: str) -> None:
    for key in value:
        if key not in known:
            raise FieldError(f"{name}.{key[:100]}", "is not a field that this server supports")


@dataclass
class _Sample:
    """Output so far of one choice of a reply."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    has_begun: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def message(self) -> dict[str, Any]:
        """Return the message of the assistant, in OpenAI's form."""
        text = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.calls and not text else text,
            "refusal": None,
            "annotations": [],
        }
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class _ChatCompletion:
    """Request of `/v1/chat/completions` that is being served."""

    def __init__(self, handler: RequestHandler, body: ChatRequest, request: Request):
        handler.check_model(body.model)
        limits = handler.limits
        check_names(body, limits)
        check_stream(body)
        refuse_unsupported(body, _UNSUPPORTED_HERE)
        self._handler, self._body = handler, body
        self.id = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
        self.headers = {"x-request-id": self.id}
        self._created = int(time.time())
        if body.top_logprobs is not None and not body.logprobs:
            raise FieldError("top_logprobs", "needs logprobs=true")
        tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls, limits)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        constraint = read_format(body.response_format)
        if constraint is not None and body.structured_outputs is not None:
            raise FieldError("structured_outputs", "cannot be set together with response_format")
        keeps_special = ChatGeneration.keeps_special_tokens(handler, tools)
        params = sampling_params(
            body,
            limits,
            request.scope["caller"],
            max_tokens=handler.backend.max_model_len if max_tokens is None else max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            structured=constraint,
            skip_special_tokens=False if keeps_special and body.skip_special_tokens is None else None,
        )
        self._params = params
        self._samples = [_Sample() for _ in range(params.n)]
        self._generation = ChatGeneration(
            handler,
            request,
            read_messages(body.messages),
            tools,
            params,
            max_tokens,
            template_settings(body, body.reasoning_effort),
            body.request_id or "",
            body.cache_salt or "",
        )

    async def whole(self, answer: dict[str, Any]) -> None:
        """Generate all output, and put the fields of the reply into `answer`."""

        async def send(steps: list[Step]) -> None:
            check_reply_entries(self._generation.num_entries, self._handler.limits)
            for step in steps:
                self._keep(step)

        await self._generation.run(send)
        choices = []
        for index, sample in enumerate(self._samples):
            choice = {
                "index": index,
                "message": sample.message(),
                "logprobs": {"content": sample.logprobs, "refusal": None} if self._body.logprobs else None,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            if self._body.return_token_ids:
                choice["token_ids"] = sample.token_ids
            choices.append(choice)
        answer.update(self._head("chat.completion"), choices=choices, usage=self._generation.usage.to_dict())
        wants_prompt = self._body.prompt_logprobs is not None
        entries = [prompt_entry(it) for it in self._generation.prompt_logprobs]
        answer["prompt_logprobs"] = entries if wants_prompt else None
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._generation.prompt

    def _keep(self, step: Step) -> None:
        sample = self._samples[step.index]
        for piece in self._shown(step):
            if piece.kind == "call":
                if piece.call_id is not None:
                    sample.calls.append(_call(piece))
                else:
                    sample.calls[piece.index]["function"]["arguments"] += piece.text
            else:
                (sample.reasoning if piece.kind == "reasoning" else sample.content).append(piece.text)
        sample.logprobs += self._logprobs(step)
        sample.token_ids += step.token_ids
        if step.finish_reason is not None:
            sample.finish_reason, sample.stop_reason = step.finish_reason, step.stop_reason

    def _shown(self, step: Step) -> list[Piece]:
        if self._body.include_reasoning is not False:
            return step.pieces
        return [piece for piece in step.pieces if piece.kind != "reasoning"]

    def _logprobs(self, step: Step) -> list[dict[str, Any]]:
        if not self._body.logprobs:
            return []
        return chat_logprobs(step.entries, self._body.top_logprobs or 0, bool(self._body.return_tokens_as_token_ids))

    async def stream(self, write: Write) -> None:
        """Generate the output, and write an event for each new part."""
        options = self._body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        continuous = wants_usage and options is not None and bool(options.continuous_usage_stats)
        head = self._head("chat.completion.chunk")
        num_sent = 0

        def chunk(choice: dict[str, Any], more: dict[str, Any], num_tokens: int | None = None) -> bytes:
            body = head | more | {"choices": [choice]}
            if wants_usage:
                body["usage"] = self._generation.usage.to_dict(num_tokens) if continuous else None
            return event(body)

        async def send(steps: list[Step]) -> None:
            nonlocal num_sent
            chunks = []
            for step in steps:
                sample = self._samples[step.index]
                if not sample.has_begun:
                    # Once, not for each sample: the prompt can be long.
                    has_prompt = self._body.return_token_ids and not any(it.has_begun for it in self._samples)
                    more = {"prompt_token_ids": self._generation.prompt} if has_prompt else {}
                    sample.has_begun = True
                    delta = {"role": "assistant", "content": "", "refusal": None}
                    first = {"index": step.index, "delta": delta, "logprobs": None, "finish_reason": None}
                    chunks.append(chunk(first, more, num_sent))
                if (choice := self._chunk_choice(step)) is not None:
                    chunks.append(chunk(choice, {}))
            num_sent = self._generation.usage.completion_tokens
            if chunks:
                await write(b"".join(chunks))

        await self._generation.run(send)
        end = event(head | {"choices": [], "usage": self._generation.usage.to_dict()}) if wants_usage else b""
        await write(end + DONE)

    def _chunk_choice(self, step: Step) -> dict[str, Any] | None:
        """Return the new output `step` as a choice of a streamed reply, or None if there is nothing to send."""
        delta: dict[str, Any] = {}
        for piece in self._shown(step):
            if piece.kind == "call":
                delta.setdefault("tool_calls", []).append(_call_delta(piece))
            else:
                name = "reasoning_content" if piece.kind == "reasoning" else "content"
                delta[name] = delta.get(name, "") + piece.text
        logprobs = self._logprobs(step)
        if not delta and not logprobs and step.finish_reason is None and not self._body.return_token_ids:
            return None
        choice: dict[str, Any] = {
            "index": step.index,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": step.finish_reason,
        }
        if step.finish_reason is not None:
            choice["stop_reason"] = step.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = list(step.token_ids)
        return choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._handler.backend.name,
        }


def _call(piece: Piece) -> dict[str, Any]:
    return {
        "id": piece.call_id,
        "type": "function",
        "function": {"name": piece.name, "arguments": piece.text},
    }


def _call_delta(piece: Piece) -> dict[str, Any]:
    if piece.call_id is None:
        return {"index": piece.index, "function": {"arguments": piece.text}}
    return {"index": piece.index, **_call(piece)}
