"""A random client of HTTP: whole answers, streams, also read slowly or broken off, and bodies that are wrong."""

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pagedd.bench.soak import prompts
from pagedd.bench.soak.ledger import Ledger
from pagedd.bench.soak.zmq_client import END_WITHIN_S

_BAD_BODIES = (
    b"",
    b"{",
    b"[]",
    b'{"prompt": ""}',
    b'{"prompt": "a", "top_p": 7}',
    b'{"prompt": "a", "max_tokens": "many"}',
    b'{"prompt": [999999999]}',
    b"\xff" * 100,
)


@dataclass(frozen=True, slots=True)
class HttpDoor:
    """Where HTTP is spoken: at a Unix socket, or at a TCP port that wants a key."""

    unix_path: Path | None = None
    port: int | None = None
    key: str | None = None

    def session(self) -> aiohttp.ClientSession:
        connector = aiohttp.UnixConnector(str(self.unix_path)) if self.unix_path is not None else aiohttp.TCPConnector()
        return aiohttp.ClientSession(
            f"http://localhost:{self.port}" if self.port is not None else "http://localhost",
            connector=connector,
            timeout=aiohttp.ClientTimeout(END_WITHIN_S),
            headers={"Authorization": f"Bearer {self.key}"} if self.key is not None else {},
        )


class HttpClient:
    """One request after another until `run` is told to stop."""

    def __init__(self, door: HttpDoor, ledger: Ledger, seed: int) -> None:
        self._door = door
        self._ledger = ledger
        self._draw = random.Random(seed)

    async def run(self, stop: asyncio.Event) -> None:
        manners = (self._whole, self._stream, self._slow, self._broken_off, self._bad, self._health)
        async with self._door.session() as http:
            while not stop.is_set():
                manner = self._draw.choice(manners)
                try:
                    await manner(http)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self._ledger.wrong.append(f"HTTP, {manner.__name__[1:]}: {type(error).__name__}: {error}")
                await asyncio.sleep(self._draw.expovariate(5))

    def _ask(self, http: aiohttp.ClientSession, *, stream: bool = False) -> Any:
        """A completion or a chat; the answer is to be entered like `http.post`."""
        text = prompts.text(self._draw)
        body = {"max_tokens": self._draw.choice((1, 16, 64)), "stream": stream}
        if self._draw.random() < 0.3:
            return http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], **body})
        return http.post("/v1/completions", json={"prompt": text, **body})

    async def _whole(self, http: aiohttp.ClientSession) -> None:
        async with self._ask(http) as response:
            self._end_of(await response.json())

    async def _stream(self, http: aiohttp.ClientSession) -> None:
        await self._read_stream(http, pause_s=0)

    async def _slow(self, http: aiohttp.ClientSession) -> None:
        await self._read_stream(http, pause_s=self._draw.uniform(0, 0.5))

    async def _read_stream(self, http: aiohttp.ClientSession, pause_s: float) -> None:
        async with self._ask(http, stream=True) as response:
            if response.status != 200:
                self._end_of(await response.json())
                return
            stream = b""
            while chunk := await response.content.read(100):
                stream += chunk
                await asyncio.sleep(pause_s)
        data = [event.removeprefix("data: ") for event in stream.decode().removesuffix("\n\n").split("\n\n")]
        errors = [json.loads(item) for item in data if item.startswith('{"error"')]
        if len(errors) + data.count("[DONE]") != 1 or (errors and data[-1] != json_of(errors[0], data)):
            self._ledger.wrong.append(f"a stream ended with {data[-3:]}")
        elif errors:
            self._end_of(errors[0])
        else:
            self._ledger.finished("stream")

    async def _broken_off(self, http: aiohttp.ClientSession) -> None:
        async with self._ask(http, stream=True) as response:
            await response.content.readany()
            response.close()
        self._ledger.ends["left"] += 1

    async def _bad(self, http: aiohttp.ClientSession) -> None:
        async with http.post("/v1/completions", data=self._draw.choice(_BAD_BODIES)) as response:
            self._ledger.refused(response.status, (await response.json())["error"]["code"])

    async def _health(self, http: aiohttp.ClientSession) -> None:
        async with http.get("/health") as response:
            if response.status != 200:
                self._ledger.wrong.append(f"/health answered {response.status}")

    def _end_of(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self._ledger.failed(answer["error"]["code"], answer["error"]["message"])
        else:
            self._ledger.finished(answer["choices"][0]["finish_reason"])


def json_of(error: dict[str, Any], data: list[str]) -> str | None:
    """The event that `error` was read from."""
    return next((item for item in data if item.startswith("{") and json.loads(item) == error), None)
