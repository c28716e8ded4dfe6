"""Writer of the messages of a call. It counts the bytes of messages that the client has not read."""

import asyncio
from typing import Any, cast

import grpc

from serving.grpc_server.open_requests import OpenRequests
from serving.grpc_server.output_coalescer import LAST_READ_S
from serving.grpc_server.statuses import SlowReaderError


class Writer:
    """Writer of the messages of one call.

    If a write is cancelled, gRPC keeps the message until the client reads the message or disconnects. Until then, the
    bytes of the message count against the client's limit.
    """

    def __init__(self, context: grpc.aio.ServicerContext, admission: OpenRequests, client: str):
        self._context, self._admission, self._client = context, admission, client
        self._has_begun = self._is_over = False
        self._num_kept = 0
        context.add_done_callback(cast(Any, self._end))

    async def write(self, message: Any) -> None:
        """Write a message. Only one write may run at a time."""
        if not self._has_begun:
            # Sent with the first message, the metadata would wait for the client, and gRPC would accept no status.
            self._has_begun = True
            await self._context.send_initial_metadata(())
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            self._keep(message.ByteSize())
            raise

    async def write_last(self, message: Any) -> None:
        """Write the only message of a call. Raises `SlowReaderError` if the write takes `LAST_READ_S` seconds."""
        try:
            async with asyncio.timeout(LAST_READ_S):
                await self.write(message)
        except TimeoutError:
            raise SlowReaderError(f"the client has not read its answer for {LAST_READ_S:g} s: read faster") from None

    def _keep(self, num_bytes: int) -> None:
        if not self._is_over:
            self._num_kept += num_bytes
            self._admission.count_bytes(self._client, num_bytes)

    def _end(self, _: Any) -> None:
        self._is_over = True
        self._admission.count_bytes(self._client, -self._num_kept)
