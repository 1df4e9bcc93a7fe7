"""A replica's daemon, without Ray: it answers, it is missed when it is gone, and it outlives nobody."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path

import psutil
import pytest

from pagedd.client import AsyncClient, PageddError
from pagedd.scale.ask import Ask, Head
from pagedd.scale.replica import Replica

FLAGS = ("--device", "cpu", "--num-blocks", "64", "--num-threads", "1", "--kv-quality-check", "off")


@pytest.fixture
def replica(model_gguf: Path) -> Iterator[Replica]:
    made = Replica(["--model", str(model_gguf), *FLAGS])
    yield made
    made.close()
    assert not made._folder.exists()


async def answer(replica: Replica, path: str, **fields: object) -> tuple[int, bytes]:
    head, body = None, b""
    async for part in replica.relay(Ask.of("POST", path, json.dumps(fields).encode())):
        if isinstance(part, Head):
            head = part
        else:
            body += part
    assert head is not None
    return head.status, body


async def test_it_answers_streams_and_refuses_as_its_daemon_does_and_is_missed_when_that_dies(replica: Replica) -> None:
    status, body = await answer(
        replica, "/v1/completions", prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert status == 200
    assert "Paris" in json.loads(body)["choices"][0]["text"]
    status, body = await answer(replica, "/v1/completions", prompt="Once", max_tokens=3, stream=True)
    assert body.endswith(b"data: [DONE]\n\n")
    status, body = await answer(replica, "/v1/completions", prompt="Once", max_tokens=10**6)
    assert (status, json.loads(body)["error"]["code"]) == (400, "prompt_too_long")
    with pytest.raises(PageddError, match="not a route of a replica"):
        await answer(replica, "/sleep")

    # Whoever stops listening has its request ended.
    ask = Ask.of(
        "POST", "/v1/completions", b'{"prompt": "Once", "max_tokens": 900, "ignore_eos": true, "stream": true}'
    )
    async with aclosing(replica.relay(ask)) as parts:
        async for part in parts:
            if isinstance(part, bytes):
                break
    async with AsyncClient(replica._folder) as client:
        async for frame in client.watch_stats():
            if not frame.requests:
                break

    await replica.check_health()
    daemon = replica._running()
    daemon.kill()
    await asyncio.to_thread(daemon.wait)
    with pytest.raises(RuntimeError, match="pagedd ended with status -9"):
        await replica.check_health()


def test_a_daemon_that_cannot_serve_is_no_replica_and_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"status 78: .*--max-num-seqs"):
        Replica(["--max-num-seq", "4"])


def test_the_daemon_ends_when_its_replica_is_killed(tmp_path: Path) -> None:
    # A stand-in that only has to live: the kernel's signal is what is tried.
    program = (
        "import sys; from pagedd.scale.replica import Replica; Replica._wait_ready = lambda self: None;"
        "print(Replica(daemon=['sh', '-c', 'exec sleep 600']).name, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", program]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline().split("/")[1])
    daemon = psutil.Process(pid)
    owner.kill()
    owner.wait()
    # Whoever inherits it may take its time to say goodbye to it.
    with suppress(psutil.NoSuchProcess):
        while daemon.is_running() and daemon.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
