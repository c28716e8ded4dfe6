"""Checks of messages and tools in OpenAI's form, and their conversion for chat templates."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amoeba_jax import StructuredOutput
from amoeba_jax.shorten import shorten
from serving.grpc_server.config import Limits
from serving.http_server.errors import FieldError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content", "reasoning"}
)
# Fields that some clients send without a value.
_EMPTY_FIELDS = frozenset({"audio", "function_call", "annotations"})

# System message for models whose template has no place for tools.
_TOOL_PROMPT = (
    "You can call functions. To call functions, answer only with a list of calls, in this form:\n"
    '<tool_call>[{"name": "function name", "arguments": {"argument name": "value"}}]</tool_call>\n'
    "If no function helps, answer without a call. The functions are:\n<tools>"
)


@dataclass(frozen=True)
class Tools:
    """Tools of a request, and how the model may use them.

    Attributes:
        functions: descriptions of the functions, in OpenAI's form. Empty: the model sees no tools.
        choice: "none", "auto", "required" or "named". "named": the model must call the only function in `functions`.
        parallel: whether an answer may have several calls.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    choice: str = "none"
    parallel: bool = True

    @property
    def forced(self) -> str | None:
        """Name of the function that the model must call. "*": any function. None: no call is required.

        This is the argument `forced` of `OutputParser`.
        """
        if self.choice == "named":
            return self.functions[0]["function"]["name"]
        return "*" if self.choice == "required" else None

    @property
    def constraint(self) -> StructuredOutput | None:
        """Constraint that makes the model call a function. None: no call is required."""
        if self.choice == "named":
            return StructuredOutput(json_schema=_parameters(self.functions[0]))
        if self.choice != "required":
            return None
        definitions: dict[str, Any] = {}
        calls = []
        for tool in self.functions:
            schema = dict(_parameters(tool))
            for name in ("$defs", "definitions"):
                own = schema.pop(name, None) or {}
                if not isinstance(own, Mapping):
                    raise FieldError(f"tools.parameters.{name}", f"must be an object, got {shorten(own)}")
                for key, value in own.items():
                    if definitions.setdefault(name, {}).setdefault(key, value) != value:
                        raise FieldError("tools", f"have two different definitions {shorten(key)}")
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": tool["function"]["name"]}, "arguments": schema},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        most = {} if self.parallel else {"maxItems": 1}
        return StructuredOutput(
            json_schema={"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, **definitions}
        )


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool["function"].get("parameters") or {"type": "object"}


def read_messages(messages: Any, name: str = "messages") -> list[dict[str, Any]]:
    """Convert messages from OpenAI's form to the form of chat templates.

    Raises `FieldError` for a message that is not supported.
    """
    if not isinstance(messages, list) or not messages:
        raise FieldError(name, f"must be a list of at least one message, got {shorten(messages)}")
    return [read_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]


def read_message(message: Any, name: str) -> dict[str, Any]:
    """Convert one message from OpenAI's form to the form of chat templates.

    `name` is the path of the message in the request, for errors. Raises `FieldError` if the message is not supported.
    """
    if not isinstance(message, dict):
        raise FieldError(name, f"must be an object, got {shorten(message)}")
    role = message.get("role")
    if role not in _ROLES:
        raise FieldError(f"{name}.role", f"must be one of {', '.join(_ROLES)}, got {shorten(role)}")
    for key, value in message.items():
        if key not in _MESSAGE_FIELDS and not (key in _EMPTY_FIELDS and not value):
            raise FieldError(f"{name}.{key[:100]}", "is not a field that this server supports")
    read: dict[str, Any] = {"role": role}
    calls = message.get("tool_calls")
    if calls and role == "assistant":
        if not isinstance(calls, list):
            raise FieldError(f"{name}.tool_calls", f"must be a list, got {shorten(calls)}")
        read["tool_calls"] = [_tool_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(calls)]
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal") or (None if calls else "")
    if content is not None or not calls:
        content = read_text(content, f"{name}.content")
    read["content"] = content
    for key in ("name", "tool_call_id"):
        if (value := message.get(key)) is not None:
            if not isinstance(value, str):
                raise FieldError(f"{name}.{key}", f"must be a string, got {shorten(value)}")
            read[key] = value
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None:
        read["reasoning_content"] = read_text(reasoning, f"{name}.reasoning_content")
    return read


def read_text(content: Any, name: str) -> str:
    """Return the text of a message content: a string or a list of text parts. Raises `FieldError` for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(name, f"must be a string or a list of parts, got {shorten(content)}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal", "input_text", "output_text", "reasoning_text", "summary_text"):
            raise FieldError(f"{name}[{index}].type", f"must be text: {shorten(kind)} is not supported by this server")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise FieldError(f"{name}[{index}].text", f"must be a string, got {shorten(text)}")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FieldError(f"{name}.function", f"must be an object with a name, got {shorten(function)}")
    call_id = call.get("id") or ""
    if not isinstance(call_id, str):
        raise FieldError(f"{name}.id", f"must be a string, got {shorten(call_id)}")
    arguments = read_arguments(function.get("arguments") or "{}", f"{name}.function.arguments")
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_arguments(text: Any, name: str) -> dict[str, Any]:
    """Return the arguments of a tool call. Raises `FieldError` if the text is no JSON object."""
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise FieldError(name, f"must be the text of a JSON object, got {shorten(text)}")
    return arguments


def read_tools(tools: Any, choice: Any, parallel: bool | None, limits: Limits) -> Tools:
    """Return the tools of a request. Raises `FieldError` for tools or a choice that are not supported."""
    if not tools:
        if choice in (None, "none", "auto"):
            return Tools()
        raise FieldError("tool_choice", f"needs tools, got {shorten(choice)}")
    if not isinstance(tools, list):
        raise FieldError("tools", f"must be a list, got {shorten(tools)}")
    if len(tools) > limits.max_tools:
        raise FieldError("tools", f"has {len(tools)} tools: at most {limits.max_tools} may be given (max_tools)")
    functions = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    mode: Any = choice
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools")
            if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
                raise FieldError("tool_choice.allowed_tools", f"must have a list of tools, got {shorten(allowed)}")
            if (number := len(allowed["tools"])) > limits.max_tools:
                raise FieldError(
                    "tool_choice.allowed_tools",
                    f"has {number} tools: at most {limits.max_tools} may be given (max_tools)",
                )
            functions = [_find(functions, _choice_name(it)) for it in allowed["tools"]]
            if len({it["function"]["name"] for it in functions}) < number:
                raise FieldError("tool_choice.allowed_tools", f"names a tool twice, got {shorten(allowed)}")
            mode = allowed.get("mode", "auto")
        else:
            return Tools([_find(functions, _choice_name(choice))], "named", parallel is not False)
    if mode == "none":
        return Tools()
    if mode not in (None, "auto", "required"):
        raise FieldError("tool_choice", f"must be none, auto, required or a function, got {shorten(choice)}")
    return Tools(functions, mode or "auto", parallel is not False)


def _tool(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise FieldError(f"{name}.type", f"must be function: {shorten(kind)} is not supported by this server")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise FieldError(f"{name}.function", f"must be an object with a name, got {shorten(function)}")
    for key, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            raise FieldError(f"{name}.function.{key}", f"has the wrong type, got {shorten(value)}")
    known = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    if not {"name", "description", "parameters", "strict"} >= set(function):
        unknown = next(key for key in function if key not in ("name", "description", "parameters", "strict"))
        raise FieldError(f"{name}.function.{unknown[:100]}", "is not a field that this server supports")
    return {"type": "function", "function": known}


def _choice_name(choice: Any) -> Any:
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _find(functions: list[dict[str, Any]], name: Any) -> dict[str, Any]:
    for tool in functions:
        if tool["function"]["name"] == name:
            return tool
    raise FieldError("tool_choice", f"names {shorten(name)}, which is not one of the tools")


def for_template(messages: list[dict[str, Any]], tools: Tools, template: str) -> list[dict[str, Any]]:
    """Convert messages to a form that the chat template `template` can show.

    If the template does not know the role `developer`, this role becomes `system`. If the template does not know tools,
    the tools become text. If the template does not know tool calls, the tool calls become text.
    """
    if "developer" not in template:
        messages = [it | {"role": "system"} if it["role"] == "developer" else it for it in messages]
    if "tool_calls" not in template:
        messages = [_with_calls_as_text(message) for message in messages]
    if tools.functions and "tools" not in template:
        listing = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools.functions)
        text = f"{_TOOL_PROMPT}\n{listing}\n</tools>"
        if messages[0]["role"] == "system":
            first = messages[0]
            messages = [first | {"content": f"{first['content']}\n\n{text}"}, *messages[1:]]
        else:
            messages = [{"role": "system", "content": text}, *messages]
    return messages


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    text = f"<tool_call>{json.dumps(calls, ensure_ascii=False)}</tool_call>"
    left = {key: value for key, value in message.items() if key != "tool_calls"}
    return left | {"content": (message["content"] or "") + text}
