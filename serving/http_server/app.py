"""FastAPI application of the HTTP port."""

import time

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

import amoeba_jax
from serving.grpc_server.request_handler import RequestHandler, State
from serving.grpc_server.statuses import code_of
from serving.http_server.chat import chat_routes
from serving.http_server.completions import completion_routes
from serving.http_server.errors import error_object, error_response, json_response
from serving.http_server.gate import App, Gate
from serving.http_server.responses import response_routes
from serving.http_server.streams import ClientGoneError
from serving.http_server.tokens import token_routes


def create_app(handler: RequestHandler) -> FastAPI:
    """Return the HTTP application that passes requests to `handler`.

    The application does not check access tokens. Wrap it in `with_gate` to serve clients.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    started_at = int(time.time())

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        status = 200 if handler.state is State.READY else 503
        return json_response({"status": "ok" if status == 200 else handler.state.value}, status)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": amoeba_jax.__version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = generate_latest(handler.metrics.registry)
        return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)

    def model_card() -> dict[str, object]:
        return {
            "id": handler.backend.name,
            "object": "model",
            "created": started_at,
            "owned_by": "amoeba",
            "root": handler.backend.name,
            "parent": None,
            "max_model_len": handler.backend.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        handler.check_model(name)
        return json_response(model_card())

    for routes in (completion_routes, chat_routes, response_routes, token_routes):
        app.include_router(routes(handler))

    async def refuse(request: Request, error: Exception) -> Response:
        await handler.refusals.wait(request.scope["caller"].account, code_of(error))
        return error_response(error)

    async def leave(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def refuse_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        method, path = request.method[:20], request.url.path[:100]
        text = f"{method} {path!r} is not served here" if error.status_code in (404, 405) else str(error.detail)
        return json_response(
            error_object(text, "invalid_request_error"), error.status_code, dict(error.headers or {}) or None
        )

    for kind in (ValueError, RuntimeError, Exception):
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(ClientGoneError, leave)
    app.add_exception_handler(HTTPException, refuse_path)
    return app


def with_gate(app: FastAPI, handler: RequestHandler) -> App:
    """Return an application that checks the access token and the size of a request before `app` gets the request."""
    return Gate(app, handler)
