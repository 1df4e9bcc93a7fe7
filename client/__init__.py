"""Talk to the pagedd daemon of this machine: `Client` (blocking) and `AsyncClient` (asyncio)."""

from pagedd.client.aio import AsyncClient
from pagedd.client.errors import PageddError
from pagedd.client.sync import Client

__all__ = ["AsyncClient", "Client", "PageddError"]
