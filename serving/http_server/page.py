"""HTTP routes of the live page: files, the stream of the server's state, and merges and splits of instances."""

import ipaddress
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import FailFast, Field

from serving.grpc_server.request_handler import RequestHandler
from serving.grpc_server.statuses import ForbiddenError
from serving.grpc_server.transform_call import transform_instances
from serving.http_server.cluster_state import cluster_state, recent
from serving.http_server.errors import json_response
from serving.http_server.feed import Feed, Write
from serving.http_server.fields import Body, read_body
from serving.http_server.streams import EventStream, event

INTERVAL_S = 0.5
"""Seconds between two messages."""
_FILES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "devices.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}


class _Transform(Body):
    """Body of a request to merge or split instances."""

    tensor_parallel_size: int = Field(ge=1, le=4096)
    devices: Annotated[list[int], FailFast()] = Field(default=[], max_length=4096)


def page_routes(handler: RequestHandler, interval_s: float = INTERVAL_S) -> APIRouter:
    """Return the routes of the live page.

    Everybody may load the files of the page. The state and the transformation need the same rights as AdminService.

    Args:
        handler: request handler of the server.
        interval_s: seconds between two messages with the state.
    """
    routes = APIRouter()
    static = files("serving.http_server") / "static"
    contents = {name: (static / name).read_bytes() for name in _FILES}

    async def produce() -> bytes:
        return event(await cluster_state(handler), "state")

    feed = Feed(produce, interval_s)

    def send_file(name: str) -> Response:
        return Response(contents[name], headers=_HEADERS, media_type=_FILES[name])

    @routes.get("/")
    async def page() -> Response:
        return send_file("page.html")

    @routes.get("/static/{name}")
    async def file(name: str) -> Response:
        if name not in contents:
            return json_response({"error": "there is no such file"}, 404)
        return send_file(name)

    @routes.get("/cluster/events")
    async def events(request: Request) -> Response:
        _check_admin(handler, request)

        async def watch(write: Write) -> None:
            await feed.watch(write, event(recent(handler), "history"))

        return EventStream(watch, {})

    @routes.post("/cluster/transform")
    async def transform(request: Request) -> Response:
        _check_admin(handler, request)
        body = await read_body(request, _Transform)
        report = await transform_instances(handler, body.tensor_parallel_size, body.devices, wait_for_programs=True)
        return json_response(
            {
                "tensor_parallel_size": report.tensor_parallel_size,
                "seconds": report.seconds,
                "moved_bytes": report.moved_bytes,
            }
        )

    return routes


def _check_admin(handler: RequestHandler, request: Request) -> None:
    """Raise an error if the caller may not administer the server. The rules are the same as for AdminService.

    If the server has no tokens, the host of the request must be an IP address or `localhost`. Without this rule, a web
    site whose name resolves to this server could control the server through the browser of a visitor.
    """
    handler.callers.check_admin(request.scope.get("token"))
    if handler.callers.needs_no_token and not _is_direct(request.url.hostname or ""):
        raise ForbiddenError(
            "a server without tokens shows its page only at an IP address or localhost: use such an address, or give "
            "the server an admin token"
        )


def _is_direct(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
