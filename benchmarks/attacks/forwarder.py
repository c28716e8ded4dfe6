"""Connections to a server from another address of this machine, which gRPC cannot choose."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def forwarded(target: str, source: str) -> AsyncIterator[str]:
    """An address on this machine whose connections go to `target`, which sees them come from `source`."""
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
        except OSError:  # the server is gone, which the request will say
            writer.close()
            return
        with contextlib.suppress(asyncio.CancelledError):  # the end: asyncio would say that it was never looked at
            await asyncio.gather(copy(reader, theirs[1]), copy(theirs[0], writer))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
