"""Both APIs over a scripted host, on real sockets, and clients that ask them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from pagedd.client.endpoints import Endpoints, ipc
from pagedd.client.protocol import (
    PROTOCOL_VERSION,
    ClientMessage,
    DaemonMessage,
    Done,
    Failed,
    Generate,
    Ping,
    Pong,
    decode_daemon,
    encode,
)
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.http_api import HttpApi
from pagedd.daemon.service import Service
from pagedd.daemon.zmq_api import ZmqApi

from .byte_model import write_model
from .scripted_host import ScriptedHost
from .waiting import WAIT_S


@dataclass
class Served:
    """A running API side. `http` and `url` are the way to the HTTP API that `post` and `get` take."""

    host: ScriptedHost
    service: Service
    endpoints: Endpoints
    http_api: HttpApi
    zmq_api: ZmqApi
    http: aiohttp.ClientSession
    context: zmq.asyncio.Context
    url: str = "http://localhost"
    tcp_port: int | None = None

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON; `body` is JSON, or bytes as they are."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.http.post(f"{self.url}{path}", data=raw) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(f"{self.url}{path}") as response:
            return response.status, msgspec.json.decode(await response.read())

    async def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream, decoded; `[DONE]` is "[DONE]"."""
        async with self.http.post(f"{self.url}{path}", json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream"
            return decode_events(await response.read())

    @asynccontextmanager
    async def client(self, path: Path | None = None) -> AsyncIterator["ZmqClient"]:
        socket = self.context.socket(zmq.DEALER)
        socket.connect(ipc(path or self.endpoints.requests))
        try:
            yield ZmqClient(socket)
        finally:
            socket.close(linger=0)


@dataclass
class ZmqClient:
    socket: zmq.asyncio.Socket

    async def say(self, message: ClientMessage) -> None:
        await self.socket.send_multipart([PROTOCOL_VERSION, encode(message)])

    async def hear(self) -> DaemonMessage:
        version, payload = await asyncio.wait_for(self.socket.recv_multipart(), WAIT_S)
        assert version == PROTOCOL_VERSION
        return decode_daemon(payload)

    async def hear_end(self) -> Done | Failed:
        while not isinstance(message := await self.hear(), Done | Failed):
            pass
        return message


@asynccontextmanager
async def serving(
    folder: Path,
    host: ScriptedHost | None = None,
    *,
    has_model: bool = True,
    inherited: Mapping[Path, int] | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Both APIs over a scripted host, in `folder`, whose path must be short enough for sockets."""
    host = host or ScriptedHost()
    endpoints = Endpoints(folder / "run")
    endpoints.directory.mkdir(exist_ok=True)
    config = DaemonConfig(**settings)
    service = Service(config, host)
    if has_model:
        service.set_model(write_model(folder / "model"))
    http_api = HttpApi(service, config, endpoints, inherited)
    zmq_api = ZmqApi(service, endpoints, inherited)
    apis = [http_api, zmq_api]
    for api in apis:
        await api.start()
    context = zmq.asyncio.Context()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(endpoints.http), limit=0)) as http:
            yield Served(host, service, endpoints, http_api, zmq_api, http, context)
    finally:
        await service.close()
        for api in apis:
            await api.close()
        context.destroy(linger=0)


def decode_events(raw: bytes) -> list[Any]:
    events: list[Any] = []
    for event in raw.split(b"\n\n")[:-1]:
        data = event.removeprefix(b"data: ")
        assert data != event, event
        events.append("[DONE]" if data == b"[DONE]" else msgspec.json.decode(data))
    return events


def prompt(text: str = "ab", request_id: str = "a", **fields: object) -> Generate:
    """A question with as few words as there can be."""
    return Generate(id=request_id, prompt=text, **fields)  # type: ignore[arg-type]


async def is_alive(served: Served) -> bool:
    """Whether a new client is answered."""
    async with served.client() as client:
        await client.say(Ping(id="alive?"))
        return isinstance(await client.hear(), Pong)
