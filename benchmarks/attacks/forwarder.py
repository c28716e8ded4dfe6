"""Forwarder of TCP connections that sets the source address, which gRPC cannot set."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def forwarded(target: str, source: str) -> AsyncIterator[str]:
    """Yield an address. Connections to this address are forwarded to `target`, with `source` as source address."""
    host, _, port = target.rpartition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
        except OSError:  # The server has ended, and the request fails.
            writer.close()
            return
        with contextlib.suppress(asyncio.CancelledError):  # asyncio reports cancellations that are never awaited.
            await asyncio.gather(copy(reader, theirs[1]), copy(theirs[0], writer))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
