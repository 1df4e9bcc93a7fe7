"""A random client of `http.sock`: whole answers, streams, streams that are broken off, and bodies that are wrong."""

import asyncio
import json
import random
from typing import Any

import aiohttp

from pagedd.bench.soak import prompts
from pagedd.bench.soak.ledger import Ledger
from pagedd.bench.soak.zmq_client import END_WITHIN_S
from pagedd.client.endpoints import Endpoints

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


class HttpClient:
    """One request after another until `run` is told to stop."""

    def __init__(self, endpoints: Endpoints, ledger: Ledger, seed: int) -> None:
        self._endpoints = endpoints
        self._ledger = ledger
        self._draw = random.Random(seed)

    async def run(self, stop: asyncio.Event) -> None:
        connector = aiohttp.UnixConnector(str(self._endpoints.http))
        timeout = aiohttp.ClientTimeout(END_WITHIN_S)
        async with aiohttp.ClientSession("http://localhost", connector=connector, timeout=timeout) as http:
            while not stop.is_set():
                manner = self._draw.choices((self._whole, self._stream, self._broken_off, self._bad, self._health))[0]
                try:
                    await manner(http)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self._ledger.wrong.append(f"HTTP, {manner.__name__[1:]}: {type(error).__name__}: {error}")
                await asyncio.sleep(self._draw.expovariate(5))

    def _body(self, **fields: Any) -> dict[str, Any]:
        return {"prompt": prompts.text(self._draw), "max_tokens": self._draw.choice((1, 16, 64)), **fields}

    async def _whole(self, http: aiohttp.ClientSession) -> None:
        async with http.post("/v1/completions", json=self._body()) as response:
            self._end_of(await response.json())

    async def _stream(self, http: aiohttp.ClientSession) -> None:
        async with http.post("/v1/completions", json=self._body(stream=True)) as response:
            if response.status != 200:
                self._end_of(await response.json())
                return
            events = (await response.read()).decode().removesuffix("\n\n").split("\n\n")
        data = [event.removeprefix("data: ") for event in events]
        errors = [json.loads(item) for item in data if item.startswith('{"error"')]
        if len(errors) + data.count("[DONE]") != 1 or (errors and data[-1] != json_of(errors[0], data)):
            self._ledger.wrong.append(f"a stream ended with {data[-3:]}")
        elif errors:
            self._end_of(errors[0])
        else:
            self._ledger.finished("stream")

    async def _broken_off(self, http: aiohttp.ClientSession) -> None:
        async with http.post("/v1/completions", json=self._body(stream=True)) as response:
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
