"""Interceptor of all calls. It checks access tokens, parses messages and turns errors into gRPC statuses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from amoeba_jax.errors import RequestError
from serving.grpc_server.callers import NO_TOKEN, Callers, bearer_token
from serving.grpc_server.refusals import Refusals
from serving.grpc_server.statuses import CredentialsError, ForbiddenError, status_of

ADMIN_SERVICE = "/amoeba.v1.AdminService/"
# Load balancers check health without a token.
_OPEN = "/grpc.health.v1.Health/"
_EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]


class _Malformed:
    """Marker for a message that could not be parsed."""


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that refuses calls without a valid access token, and turns exceptions into gRPC statuses."""

    def __init__(self, callers: Callers, refusals: Refusals):
        self._callers, self._refusals = callers, refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Check the access token of a call, and return a handler for the call.

        If the token is valid, the handler runs the called method. If the token is not valid, the handler refuses the
        call. If the server does not have the method, return None, so that gRPC refuses the call.
        """
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        try:
            self._check_token(handler_call_details)
        except (CredentialsError, ForbiddenError) as error:
            return self._refusing(error)
        return self._guarded(handler)

    def _check_token(self, details: grpc.HandlerCallDetails) -> None:
        callers = self._callers
        if details.method.startswith(_OPEN) or callers.needs_no_token:
            return
        given = bearer_token(details.invocation_metadata or ())
        if details.method.startswith(ADMIN_SERVICE):
            callers.check_admin(given)
        elif not (callers.is_admin(given) or callers.inference_is_open or callers.is_client(given)):
            raise CredentialsError(NO_TOKEN)

    async def _abort(self, status: grpc.StatusCode, text: str, context: grpc.aio.ServicerContext) -> None:
        await self._refusals.wait(self._callers.caller(context).account, status)
        await context.abort(status, text)

    def _refusing(self, error: Exception) -> grpc.RpcMethodHandler:
        """Return a handler that answers every call with an error, without reading a message."""
        status, text = status_of(error)

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            await self._abort(status, text, context)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _guarded(self, handler: Any) -> grpc.RpcMethodHandler:
        """Return a handler that parses messages, calls `handler`, and turns errors of `handler` into statuses.

        `handler` returns its answer, or writes the answer itself and returns None. The returned handler is always a
        streaming handler. With any other handler, gRPC would keep the request message in memory until the call ends.
        """
        parse = handler.request_deserializer

        def read(data: bytes) -> Any:
            try:
                return parse(data)
            except (DecodeError, UnicodeDecodeError):
                return _Malformed

        def guard(behavior: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
            async def answer(requests: Any, context: grpc.aio.ServicerContext) -> None:
                if handler.request_streaming:
                    given = _well_formed(requests)
                elif (given := await context.read()) is _EOF:
                    raise RequestError("the call has no message")
                elif given is _Malformed:
                    raise RequestError("the message is damaged, or has a text that is not UTF-8")
                answers = behavior(given, context)
                if isinstance(answers, AsyncIterator):
                    async for message in answers:
                        await context.write(message)
                elif (message := await answers) is not None:
                    await context.write(message)

            async def behave(requests: Any, context: grpc.aio.ServicerContext) -> None:
                try:
                    await answer(requests, context)
                    return
                except (asyncio.CancelledError, grpc.aio.AbortError):
                    raise
                except Exception as error:
                    status, text = status_of(error)
                # Outside the except block: the error and its message are freed while a slow client reads the refusal.
                await self._abort(status, text, context)

            return behave

        if handler.request_streaming:
            behavior = handler.stream_stream
        else:
            behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
        return grpc.stream_stream_rpc_method_handler(guard(behavior), read, handler.response_serializer)


async def _well_formed(requests: Any) -> Any:
    async for request in requests:
        if request is _Malformed:
            raise RequestError("a message is damaged, or has a text that is not UTF-8")
        yield request
        del request  # frees a long message while this call waits for the next
