"""The two ways to the same HTTP API, for tests that write to a connection byte by byte."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from .served import Served

# Whose keys open the TCP port.
KEYS = "owner first-key admin\nother second-key\n"


@dataclass
class Door:
    """The Unix socket, or a TCP port with a key."""

    served: Served
    port: int | None

    def head(self, key: bytes = b"first-key") -> bytes:
        """The headers that it asks for."""
        return b"Host: localhost:%d\r\nAuthorization: Bearer %b\r\n" % (self.port, key) if self.port else b"Host: x\r\n"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.port is None:
            return await asyncio.open_unix_connection(str(self.served.endpoints.http))
        return await asyncio.open_connection("127.0.0.1", self.port)

    @asynccontextmanager
    async def sending(
        self, path: str, head: bytes, key: bytes = b"first-key"
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection on which the head of a POST has been sent."""
        reader, writer = await self.connect()
        writer.write(b"POST %b HTTP/1.1\r\n%b%b\r\n\r\n" % (path.encode(), self.head(key), head))
        try:
            yield reader, writer
        finally:
            writer.close()
