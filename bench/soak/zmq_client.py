"""A random client of `pagedd.sock` that counts the ends of its requests: `AsyncClient` would hide a second one."""

import asyncio
import itertools
import random

import zmq
import zmq.asyncio

from pagedd.bench.soak import prompts
from pagedd.bench.soak.ledger import Ends, Ledger
from pagedd.client.endpoints import Endpoints, ipc
from pagedd.client.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Chat,
    ChatMessage,
    Delta,
    Done,
    Failed,
    Generate,
    Ok,
    Sampling,
    Waking,
    decode_daemon,
    encode,
)

# Longer than an engine's longest pause between two lives.
END_WITHIN_S = 120.0
_BAD = "bad"
_BAD_PAYLOADS = (
    b"",
    b"\xc1",
    b"\x81\xa4type\xa7unknown",
    encode(Generate(id=_BAD, prompt="")),
    encode(Generate(id=_BAD, prompt="a", sampling=Sampling(temperature=-1))),
    encode(Generate(id=_BAD, prompt_token_ids=[10**9])),
    encode(Chat(id=_BAD, messages=[])),
    encode(Cancel(id=_BAD, target="nobody")),
)


class ZmqClient:
    """One connection after another, each with a few requests, until `run` is told to stop."""

    def __init__(self, name: str, endpoints: Endpoints, ledger: Ledger, seed: int) -> None:
        self._name = name
        self._endpoints = endpoints
        self._ledger = ledger
        self._draw = random.Random(seed)
        self._ids = itertools.count(1)
        self._context = zmq.asyncio.Context.instance()

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            socket = self._context.socket(zmq.DEALER)
            socket.connect(ipc(self._endpoints.requests))
            ends = Ends(self._ledger)
            try:
                for _ in range(self._draw.randint(1, 4)):
                    if not await self._visit(socket, ends):
                        break
                    await asyncio.sleep(self._draw.expovariate(5))
            finally:
                ends.left()
                socket.close(linger=0)

    async def _visit(self, socket: zmq.asyncio.Socket, ends: Ends) -> bool:
        """False when the connection is of no further use."""
        manner = self._draw.choices(("wait", "cancel", "slow", "leave", "bad"), (10, 3, 2, 3, 4))[0]
        if manner == "bad":
            ends.sent_bad()
            await self._say(socket, self._draw.choice(_BAD_PAYLOADS))
        else:
            for _ in range(self._draw.randint(1, 3)):
                request = self._request()
                ends.sent(request.id)
                await self._say(socket, encode(request))
        match manner:
            case "leave":
                await asyncio.sleep(self._draw.uniform(0, 0.5))
                return False
            case "slow":
                await asyncio.sleep(self._draw.uniform(0.5, 3))
            case "cancel":
                await asyncio.sleep(self._draw.uniform(0, 0.3))
                target = self._draw.choice(sorted(ends.waiting))
                await self._say(socket, encode(Cancel(id=f"cancel {target}", target=target)))
        return await self._hear_ends(socket, ends, is_slow=manner == "slow")

    async def _hear_ends(self, socket: zmq.asyncio.Socket, ends: Ends, *, is_slow: bool) -> bool:
        """False when they do not come."""
        while ends.is_open:
            try:
                message = await self._hear(socket)
            except TimeoutError:
                self._ledger.wrong.append(f"{ends.missing} did not end within {END_WITHIN_S:g} s")
                return False
            match message:
                case Failed(id="" | "bad", code=code):
                    ends.refused_bad()
                    self._ledger.refused(400, code)
                case Waking():
                    pass  # `Accepted` follows
                case Accepted(id=request_id):
                    ends.accepted(request_id)
                case Delta(id=request_id):
                    ends.heard(request_id)
                case Done(id=request_id, choices=choices):
                    ends.ended(request_id)
                    self._ledger.finished(choices[0].finish_reason)
                case Failed(id=request_id, code=code) if not request_id.startswith("cancel "):
                    ends.ended(request_id)
                    self._ledger.failed(code, message.message, is_slow=is_slow)
                case Ok() | Failed():
                    pass  # to a cancel, which may have come too late
                case _:
                    self._ledger.wrong.append(f"nobody asked for {type(message).__name__}")
        return True

    def _request(self) -> Generate | Chat:
        draw = self._draw
        request_id = f"{self._name}.{next(self._ids)}"
        sampling = Sampling(
            max_tokens=draw.choice((1, 4, 16, 48)),
            temperature=draw.choice((0.0, 1.0)),
            n=draw.choice((1, 1, 1, 2)),
            stop=draw.choice(([], ["\n"])),
            ignore_eos=draw.random() < 0.5,
        )
        priority = draw.choice((-5, 0, 0, 0, 5))
        stream = draw.random() < 0.7
        if draw.random() < 0.3:
            messages = [ChatMessage(role="user", content=prompts.text(draw))]
            return Chat(id=request_id, messages=messages, sampling=sampling, priority=priority, stream=stream)
        prompt = prompts.text(draw)
        return Generate(id=request_id, prompt=prompt, sampling=sampling, priority=priority, stream=stream)

    async def _say(self, socket: zmq.asyncio.Socket, payload: bytes) -> None:
        await socket.send_multipart([PROTOCOL_VERSION, payload])

    async def _hear(self, socket: zmq.asyncio.Socket) -> object:
        """Raises `TimeoutError`."""
        frames = await asyncio.wait_for(socket.recv_multipart(), END_WITHIN_S)
        return decode_daemon(frames[1])
