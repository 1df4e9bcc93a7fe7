"""What goes wrong in the middle of a request, over every transport: it ends once, with the fault's code, and alone."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq

from pagedd.client.endpoints import ipc
from pagedd.client.protocol import PROTOCOL_VERSION, Delta, Done, Failed, Generate, Sampling, encode
from pagedd.daemon.engine_state import EngineState

from .conftest import StartDaemon
from .fake_engine import Prompt
from .scripted_host import ScriptedHost, engine_info, engine_stats
from .served import Served, decode_events, serving
from .test_server import metric
from .waiting import until

KEY = "first-key"
# The texts that came, and how it ended: the code of an error, or why there are no more tokens.
Heard = tuple[str, list[str]]
Ask = Callable[[Served], Awaitable[Heard]]


@pytest.fixture
async def served(socket_folder: Path, free_port: int) -> AsyncIterator[Served]:
    keys = socket_folder / "keys"
    keys.write_text(KEY)
    host = ScriptedHost(reply=lambda request: None)
    async with serving(socket_folder, host, http_port=free_port, api_key_file=keys, drain_seconds=0.05) as running:
        yield replace(running, tcp_port=free_port)


async def over_unix(served: Served) -> Heard:
    body = {"prompt": "a", "max_tokens": 8, "stream": True}
    async with served.http.post(f"{served.url}/v1/completions", json=body) as response:
        raw = await response.read()
    if response.status != 200:
        return "", [json.loads(raw)["error"]["code"]]
    events = [event for event in decode_events(raw) if event != "[DONE]"]
    errors = [event["error"]["code"] for event in events if "error" in event]
    choices = [event["choices"][0] for event in events if "error" not in event]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    return "".join(choice["text"] for choice in choices), errors + reasons


async def over_tcp(served: Served) -> Heard:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:
        return await over_unix(replace(served, http=http, url=f"http://localhost:{served.tcp_port}"))


async def over_zmq(served: Served) -> Heard:
    text, ends = "", []
    async with served.client() as client:
        await client.say(Generate(id="a", prompt="a", sampling=Sampling(max_tokens=8)))
        while not ends:
            match await client.hear():
                case Delta(text=new):
                    text += new
                case Done(choices=[choice]):
                    ends.append(choice.finish_reason)
                case Failed(code=code):
                    ends.append(code)
        await client.say(Generate(id="last", prompt=""))  # what comes behind an end would come before this
        assert (await client.hear_end()).id == "last"
    return text, ends


TRANSPORTS: dict[str, Ask] = {"unix": over_unix, "tcp": over_tcp, "zmq": over_zmq}


def engine_dies(served: Served, request_id: str) -> None:
    served.host.lose()
    served.host.info, served.host.stats = engine_info(), engine_stats()
    served.host.state = EngineState.READY


def engine_sleeps(served: Served, request_id: str) -> None:
    served.host.on_ended()
    served.host.live.clear()


FAULTS: dict[str, Callable[[Served, str], object]] = {
    "engine_died": engine_dies,
    "engine_asleep": engine_sleeps,
    "nan_logits": lambda served, request_id: served.host.produce(
        request_id, [], finish_reason="error", error_code="nan_logits", error_message="scripted"
    ),
    "out_of_memory": lambda served, request_id: served.host.on_refused(request_id, "out_of_memory", "scripted"),
    "abort": lambda served, request_id: served.service.cancel(request_id),
    "stop": lambda served, request_id: served.host.produce(request_id, b"b", finish_reason="stop"),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_request_ends_once_and_the_next_one_is_served(
    served: Served, transport: str, fault: str, num_tokens: int
) -> None:
    ask = TRANSPORTS[transport]
    asked = asyncio.ensure_future(ask(served))
    await until(lambda: bool(served.host.submitted))
    request_id = served.host.submitted[0].request_id
    for _ in range(num_tokens):
        served.host.produce(request_id, b"b")
        await asyncio.sleep(0.01)
    FAULTS[fault](served, request_id)
    text, ends = await asked
    assert ends == [fault]
    assert text == "b" * (num_tokens + (fault == "stop"))
    served.host.reply = lambda request: [99]
    assert await ask(served) == ("c", ["length"])
    assert not list(served.service.live_entries())


async def test_a_full_queue_refuses_over_every_transport_and_the_daemon_lives(
    socket_folder: Path, free_port: int
) -> None:
    keys = socket_folder / "keys"
    keys.write_text(KEY)
    host = ScriptedHost(reply=lambda request: None)
    settings: dict[str, Any] = {"http_port": free_port, "api_key_file": keys, "max_num_seqs": 1}
    async with serving(socket_folder, host, max_queued_requests=1, **settings) as running:
        served = replace(running, tcp_port=free_port)
        held = [asyncio.ensure_future(over_zmq(served)) for _ in range(2)]
        await until(lambda: len(host.submitted) == 2)
        for ask in TRANSPORTS.values():
            assert await ask(served) == ("", ["queue_full"])
        assert (await served.get("/health"))[0] == 200
        for request in list(host.submitted):
            host.produce(request.request_id, b"b", finish_reason="length")
        assert await asyncio.gather(*held) == [("b", ["length"])] * 2


def test_whoever_does_not_read_holds_up_no_end_and_everybody_else_hears_it(
    start_daemon: StartDaemon, free_port: int, tmp_path: Path
) -> None:
    """Three that never read, a stream over each kind of HTTP, one that waits for its whole answer."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    daemon = start_daemon(
        "--drain-seconds=0.3", f"--http-port={free_port}", f"--api-key-file={keys}", fake_engine=True
    ).wait_ready()
    prompt = [Prompt.SLOW, 5]
    context = zmq.Context()
    sleepers = []
    for _ in range(3):
        sleeper = context.socket(zmq.DEALER)
        sleeper.setsockopt(zmq.RCVHWM, 1)
        sleeper.connect(ipc(daemon.endpoints.requests))
        request = Generate(id="a", prompt_token_ids=prompt, sampling=Sampling(max_tokens=1000))
        sleeper.send_multipart([PROTOCOL_VERSION, encode(request)])
        sleepers.append(sleeper)
    streams = [_post(socket.socket(socket.AF_UNIX), str(daemon.endpoints.http), prompt, stream=True)]
    streams.append(_post(socket.socket(socket.AF_INET), ("127.0.0.1", free_port), prompt, stream=True))
    whole = _post(socket.socket(socket.AF_UNIX), str(daemon.endpoints.http), prompt, stream=False)
    for stream in streams:
        while b"data: " not in stream.recv(4096):
            pass
    daemon.wait_until(lambda daemon: metric(daemon, "vllm:num_requests_running") == 6)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(10) == 0
    for stream in streams:
        assert b'"code":"shutting_down"' in _rest(stream).replace(b'": "', b'":"')
    assert b"shutting_down" in _rest(whole)
    for sleeper in sleepers:
        sleeper.close(linger=0)
    context.term()


def _post(connection: socket.socket, address: Any, prompt: list[int], *, stream: bool) -> socket.socket:
    body = json.dumps({"prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": stream}).encode()
    connection.settimeout(20)
    connection.connect(address)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def _rest(connection: socket.socket) -> bytes:
    raw = b""
    while part := connection.recv(65536):
        raw += part
    connection.close()
    return raw
