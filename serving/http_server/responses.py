"""Endpoint `/v1/responses` of OpenAI's API, without stored conversations."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from amoeba_jax.errors import RequestError
from amoeba_jax.shorten import shorten
from serving.grpc_server.field_limits import check_reply_entries
from serving.grpc_server.request_handler import RequestHandler
from serving.http_server.chat import TemplateFields, read_format, template_settings
from serving.http_server.chat_generation import ChatGeneration, Step
from serving.http_server.conversation import read_arguments, read_message, read_text, read_tools
from serving.http_server.errors import FieldError, dump, error_body, json_response
from serving.http_server.fields import (
    UNSUPPORTED,
    Body,
    check_names,
    read_body,
    refuse_unsupported,
    sampling_params,
)
from serving.http_server.response_items import ResponseItems
from serving.http_server.streams import DONE, EventStream, Write, event, while_connected

_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")


class TextFields(Body):
    """Content of the field `text` of a request body: the format of the output."""

    format: Any = None
    verbosity: str | None = None


class ReasoningFields(Body):
    """Content of the field `reasoning` of a request body."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponseRequest(TemplateFields):
    """Body of a request to `/v1/responses`."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    include: Any = None
    top_logprobs: int | None = None
    truncation: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream_options: Any = None
    background: bool | None = None
    conversation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    access_programs: Any = None
    image: Any = None


_UNSUPPORTED_HERE: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": UNSUPPORTED["spaces_between_special_tokens"],
    "chat_template": (),
    "documents": ([],),
    "background": (False,),
    "truncation": ("auto", "disabled"),
    **dict.fromkeys(("conversation", "previous_response_id", "prompt", "moderation", "access_programs"), ()),
    "context_management": ([],),
    "image": (),
}


def response_routes(handler: RequestHandler) -> APIRouter:
    """Return the HTTP routes of `/v1/responses`."""
    routes = APIRouter()

    @routes.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body = await read_body(request, ResponseRequest)
        response = _Response(handler, body, request)
        if body.stream:
            return EventStream(response.stream, response.headers, response.failed)
        await while_connected(request.receive, response.whole())
        return json_response(response.resource(), headers=response.headers)

    return routes


class _Response:
    """Request of `/v1/responses` that is being served."""

    def __init__(self, handler: RequestHandler, body: ResponseRequest, request: Request):
        handler.check_model(body.model)
        check_names(body, handler.limits)
        refuse_unsupported(body, _UNSUPPORTED_HERE)
        self._handler, self._body = handler, body
        self.id = f"resp_{body.request_id or uuid.uuid4().hex}"
        self.headers = {"x-request-id": self.id}
        self._created = int(time.time())
        self._completed: int | None = None
        self._status, self._error = "in_progress", None
        self._sequence = 0
        include = body.include or []
        if not isinstance(include, list):
            raise FieldError("include", f"must be a list, got {shorten(include)}")
        for index, name in enumerate(include):
            if name not in _INCLUDABLE:
                raise FieldError(f"include[{index}]", f"is not supported by this server, got {shorten(name)}")
        wants_logprobs = _LOGPROBS in include or bool(body.top_logprobs)
        flat = _nested(body.tools)
        tools = read_tools(flat, _nested_choice(body.tool_choice), body.parallel_tool_calls, handler.limits)
        constraint = read_format(body.text.format if body.text else None, "text.format")
        keeps_special = ChatGeneration.keeps_special_tokens(handler, tools)
        limit = body.max_output_tokens
        params = sampling_params(
            body,
            handler.limits,
            request.scope["caller"],
            max_tokens=handler.backend.max_model_len if limit is None else limit,
            logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
            structured=constraint,
            skip_special_tokens=False if keeps_special and body.skip_special_tokens is None else None,
        )
        self._params = params
        messages = read_input(body.input)
        if body.instructions is not None:
            messages = [{"role": "system", "content": body.instructions}, *messages]
        self._generation = ChatGeneration(
            handler,
            request,
            messages,
            tools,
            params,
            limit,
            template_settings(body, body.reasoning.effort if body.reasoning else None),
            body.request_id or "",
            body.cache_salt or "",
        )
        self._items = ResponseItems(body.top_logprobs or 0)
        try:
            dump(self.resource())
        except ValueError:  # such as 1e999, which is read as infinity
            raise RequestError("the body has a number that is out of range: JSON has no infinity") from None

    async def whole(self) -> None:
        """Generate the whole response. `resource` returns it afterwards."""

        async def send(steps: list[Step]) -> None:
            check_reply_entries(self._generation.num_entries, self._handler.limits)
            for step in steps:
                self._take(step)

        await self._generation.run(send)

    async def stream(self, write: Write) -> None:
        """Generate the response, and write an event for each new output."""
        has_begun = False

        async def send(steps: list[Step]) -> None:
            nonlocal has_begun
            events = []
            if not has_begun:
                has_begun = True
                events += [{"type": "response.created"}, {"type": "response.in_progress"}]
                for it in events:
                    it["response"] = self.resource()
            for step in steps:
                events += self._take(step)
            if events:
                await write(b"".join(map(self._event, events)))

        await self._generation.run(send)
        await write(self._event({"type": f"response.{self._status}", "response": self.resource()}) + DONE)

    def failed(self, error: BaseException) -> bytes:
        """Return the event that reports an error in a stream that has started."""
        _, body = error_body(error)
        self._status = "failed"
        self._error = {"code": body["error"]["type"], "message": body["error"]["message"]}
        return self._event({"type": "response.failed", "response": self.resource()}) + DONE

    def _take(self, step: Step) -> list[dict[str, Any]]:
        events = self._items.take(step)
        if step.finish_reason is not None:
            self._status = "completed" if step.finish_reason in ("stop", "tool_calls") else "incomplete"
            events += self._items.end(self._status)
            self._completed = int(time.time())
        return events

    def _event(self, body: dict[str, Any]) -> bytes:
        numbered = {"type": body.pop("type"), "sequence_number": self._sequence, **body}
        self._sequence += 1
        return event(numbered, numbered["type"])

    def resource(self) -> dict[str, Any]:
        """Return the response object, with the output so far."""
        body, usage = self._body, self._generation.usage
        text: dict[str, Any] = {"format": _shown_format(body.text.format if body.text else None)}
        if body.text and body.text.verbosity is not None:
            text["verbosity"] = body.text.verbosity
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed if self._status == "completed" else None,
            "status": self._status,
            "incomplete_details": incomplete,
            "model": self._handler.backend.name,
            "previous_response_id": None,
            "instructions": body.instructions,
            "output": self._items.copy(),
            "error": self._error,
            "tools": [_shown_tool(tool) for tool in body.tools or ()],
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "truncation": body.truncation or "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": text,
            "top_p": self._params.top_p,
            "presence_penalty": self._params.presence_penalty,
            "frequency_penalty": self._params.frequency_penalty,
            "top_logprobs": body.top_logprobs or 0,
            "temperature": self._params.temperature,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            },
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": body.metadata or {},
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
        }


def read_input(value: Any) -> list[dict[str, Any]]:
    """Return the conversation in the field `input`: a text or a list of items. Raises `FieldError` for other items."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise FieldError("input", f"must be a text or a list of items, and not empty, got {shorten(value)}")
    messages: list[dict[str, Any]] = []
    reasoning: str | None = None
    for index, item in enumerate(value):
        name = f"input[{index}]"
        if not isinstance(item, dict):
            raise FieldError(name, f"must be an object, got {shorten(item)}")
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning = _reasoning(item, name)
            continue
        if kind == "message":
            known = {key: it for key, it in item.items() if key not in ("type", "id", "status", "phase")}
            message = read_message(known, name)
        elif kind == "function_call":
            message = _function_call(item, name)
            last = messages[-1] if messages else {}
            if last.get("role") == "assistant" and reasoning is None:
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
                continue
        elif kind == "function_call_output":
            output = read_text(item.get("output"), f"{name}.output")
            message = {"role": "tool", "content": output, "tool_call_id": _text(item, "call_id", name)}
        else:
            raise FieldError(f"{name}.type", f"is not supported by this server, got {shorten(kind)}")
        if reasoning is not None and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
        reasoning = None
        messages.append(message)
    if not messages:
        raise FieldError("input", "must have a message")
    return messages


def _reasoning(item: dict[str, Any], name: str) -> str | None:
    if item.get("encrypted_content") is not None:
        raise FieldError(f"{name}.encrypted_content", "is not supported by this server")
    content = item.get("content") or item.get("summary")
    return read_text(content, f"{name}.content") if content else None


def _function_call(item: dict[str, Any], name: str) -> dict[str, Any]:
    arguments = read_arguments(item.get("arguments") or "{}", f"{name}.arguments")
    function = {"name": _text(item, "name", name), "arguments": arguments}
    call = {"id": _text(item, "call_id", name), "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _text(item: dict[str, Any], key: str, name: str) -> str:
    if not isinstance(value := item.get(key), str):
        raise FieldError(f"{name}.{key}", f"must be a string, got {shorten(value)}")
    return value


def _nested(tools: Any) -> Any:
    """Convert function tools to the form of chat completions.

    Other values are returned unchanged. `read_tools` checks them later.
    """
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": {key: it for key, it in tool.items() if key != "type"}}
        if isinstance(tool, dict) and tool.get("type") == "function"
        else tool
        for tool in tools
    ]


def _nested_choice(choice: Any) -> Any:
    """Convert the tool choice `allowed_tools` to the form of chat completions. Other choices are returned unchanged."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": choice}
    return choice


def _shown_format(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {"type": "text"}
    if value.get("type") != "json_schema":
        return dict(value)
    return {"name": "", "description": None, "strict": False} | dict(value)


def _shown_tool(tool: Any) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None} | dict(tool)
