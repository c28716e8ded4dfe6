"""Endpoints `/tokenize` and `/detokenize`, with vLLM's fields."""

from typing import Any

from fastapi import APIRouter, Request, Response

from amoeba_jax.errors import RequestError
from amoeba_jax.shorten import shorten
from serving.grpc_server.calls import Chat, Prompt
from serving.grpc_server.request_handler import RequestHandler
from serving.http_server.chat import template_settings
from serving.http_server.conversation import for_template, read_messages, read_tools
from serving.http_server.errors import FieldError, json_response
from serving.http_server.fields import Body, read_body, refuse_unsupported


class TokenizeRequest(Body):
    """Body of `/tokenize`: a text, or a conversation with arguments of the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: Any = None


def token_routes(handler: RequestHandler) -> APIRouter:
    """Return the HTTP routes of `/tokenize` and `/detokenize`."""
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest)
        handler.check_model(body.model or "")
        refuse_unsupported(body, {"chat_template": ()})
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages")
        prompt: Prompt
        if body.prompt is None:
            tools = read_tools(body.tools, None, None, handler.limits)
            template = handler.tokenizer().chat_template
            messages = for_template(read_messages(body.messages), tools, template)
            prompt = Chat(messages, tools.functions, template_settings(body, None))
        else:
            prompt = body.prompt
        async with handler.admitted(request.scope["caller"], 0, handler.limits.max_http_s):
            special = body.add_special_tokens is not False
            tokens = [] if prompt == "" else await handler.tokenize(prompt, special)
        entry = handler.tokenizer().vocabulary_entry
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": handler.backend.max_model_len,
                "tokens": tokens,
                "token_strs": [entry(token) for token in tokens] if body.return_token_strs else None,
            }
        )

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest)
        handler.check_model(body.model or "")
        vocabulary = handler.backend.dims.config.vocab_size
        if not isinstance(body.tokens, list):
            raise FieldError("tokens", f"must be a list of token ids, got {shorten(body.tokens)}")
        handler.check_num_tokens("tokens", len(body.tokens))
        for index, token in enumerate(body.tokens):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise FieldError(f"tokens[{index}]", f"must be in [0, {vocabulary}), got {shorten(token)}")
        async with handler.admitted(request.scope["caller"], 0, handler.limits.max_http_s):
            return json_response({"prompt": await handler.detokenize(body.tokens, False)})

    return routes
