"""Requests against the real daemon with the real model: isolation, seeds, and what leaving clients leave behind."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from pagedd.bench.peak_memory import tree_bytes

from .conftest import RunningDaemon, StartDaemon

WAIT_S = 60.0
# Long enough for several blocks of 16 tokens.
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture
async def http(serving_daemon: RunningDaemon) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(str(serving_daemon.endpoints.http), limit=0)
    async with aiohttp.ClientSession("http://localhost", connector=connector) as session:
        yield session


def test_a_pool_that_the_machine_can_never_hold_is_an_error_in_the_settings_and_not_tried_again(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon("--num-blocks", "2000000000")
    assert daemon.process.wait(60) == os.EX_CONFIG
    assert "invalid_setting: num_blocks 2000000000 of " in daemon.log
    assert "starting another" not in daemon.log


async def complete(http: aiohttp.ClientSession, **body: Any) -> Any:
    async with http.post("/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def metric(http: aiohttp.ClientSession, name: str) -> float:
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


async def until_idle(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(WAIT_S):
        while await metric(http, "pagedd:num_blocks_used"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # what is waited for has no event


async def test_the_model_answers_over_http(http: aiohttp.ClientSession) -> None:
    answer = await complete(http, prompt="The capital of France is", max_tokens=16, temperature=0)
    assert "Paris" in answer["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == 5


async def test_the_official_client_chats_with_the_model(serving_daemon: RunningDaemon) -> None:
    httpx2 = pytest.importorskip("httpx2")
    openai = pytest.importorskip("openai")
    transport = httpx2.AsyncHTTPTransport(uds=str(serving_daemon.endpoints.http))
    async with httpx2.AsyncClient(transport=transport) as client:
        chats = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="-", http_client=client).chat.completions
        asked: dict[str, Any] = {
            "model": "default",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_completion_tokens": 24,
            "temperature": 0,
        }
        whole = (await chats.create(**asked)).choices[0].message.content
        stream = await chats.create(**asked, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert whole.strip()
    assert "".join(pieces) == whole


async def test_a_seed_gives_the_same_tokens_whoever_shares_the_batch(start_daemon: StartDaemon) -> None:
    # A bfloat16 product may round differently in a batch of another size, and a draw then falls elsewhere.
    daemon = start_daemon("--num-blocks", "64", "--dtype", "float32").wait_ready()
    connector = aiohttp.UnixConnector(str(daemon.endpoints.http))
    async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
        await check_seeds(http)


async def check_seeds(http: aiohttp.ClientSession) -> None:
    async def seeded() -> str:
        answer = await complete(http, prompt="Once upon a time", max_tokens=32, seed=42, temperature=0.8)
        text: str = answer["choices"][0]["text"]
        return text

    async def with_mates() -> str:
        mates = [complete(http, prompt=f"Mate {i}:", max_tokens=24, temperature=1.0) for i in range(3)]
        text, *_ = await asyncio.gather(seeded(), *mates)
        return text

    alone = await seeded()
    assert [await with_mates() for _ in range(4)] == [alone] * 4
    other = await complete(http, prompt="Once upon a time", max_tokens=32, seed=43, temperature=0.8)
    assert other["choices"][0]["text"] != alone


async def test_clients_that_leave_in_the_middle_leave_no_block_in_use(
    http: aiohttp.ClientSession, serving_daemon: RunningDaemon
) -> None:
    # `test_http_generate.py` does it two hundred times, with a scripted engine.
    body = b'{"prompt": "Once upon a time", "max_tokens": 2000, "stream": true, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    for _ in range(20):
        reader, writer = await asyncio.open_unix_connection(str(serving_daemon.endpoints.http))
        writer.write(head + body)
        for _ in range(5):
            await asyncio.wait_for(reader.readuntil(b"data: "), WAIT_S)
        writer.close()
        answer = await complete(http, prompt="Hi", max_tokens=2, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 2
    await until_idle(http)


async def test_a_salt_keeps_a_prompt_apart_and_the_same_salt_does_not(http: aiohttp.ClientSession) -> None:
    async def cached(**fields: Any) -> int:
        answer = await complete(http, prompt="Salted. " + PROMPT, max_tokens=1, **fields)
        tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert await cached() == 0
    assert await cached(cache_salt="uid:0") == 0
    assert await cached(cache_salt="A") == 0
    assert await cached(cache_salt="A") > 0
    assert await cached() > 0


async def test_callers_do_not_share_prompts_even_with_each_others_salt(
    start_daemon: StartDaemon, socket_folder: Path, free_port: int
) -> None:
    (socket_folder / "keys").write_text("one\ntwo\n")
    daemon = start_daemon(
        "--num-blocks", "64", "--http-port", str(free_port), "--api-key-file", str(socket_folder / "keys")
    ).wait_ready()

    async def cached(http: aiohttp.ClientSession, key: str | None, **fields: Any) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        body = {"prompt": PROMPT, "max_tokens": 1, **fields}
        async with http.post("/v1/completions", json=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
            tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return tokens

    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{free_port}") as tcp,
        aiohttp.ClientSession("http://x", connector=aiohttp.UnixConnector(str(daemon.endpoints.http))) as unix,
    ):
        assert await cached(tcp, "one") == 0
        assert await cached(tcp, "two") == 0
        assert await cached(unix, None) == 0
        assert await cached(tcp, "one") > 0
        assert await cached(tcp, "one", cache_salt="s") == 0
        assert await cached(tcp, "two", cache_salt="s") == 0
        assert await cached(unix, None) > 0


async def test_a_prompt_that_does_not_fit_is_refused_with_the_models_own_numbers(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json={"prompt": [1] * 8, "max_tokens": 8185}) as response:
        answer = await response.json()
    assert response.status == 400
    assert answer["error"]["code"] == "prompt_too_long"
    assert "prompt 8 + output 8185 = 8193 tokens, context 8192" in answer["error"]["message"]
    async with http.post("/v1/completions", json={"prompt": [1] * 8, "max_tokens": 5000}) as response:
        answer = await response.json()
    assert response.status == 400
    assert answer["error"]["code"] == "exceeds_kv_pool"
    assert "(256 blocks of 16)" in answer["error"]["message"]


async def test_both_processes_hold_little_beside_weights_and_pool(start_daemon: StartDaemon, model_gguf: Path) -> None:
    # One of its own: what other tests made the shared one hold is no part of this.
    daemon = start_daemon("--num-blocks", "256").wait_ready()
    weight_bytes = model_gguf.stat().st_size  # noqa: ASYNC240 (returns at once)
    connector = aiohttp.UnixConnector(str(daemon.endpoints.http), limit=0)
    async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
        await asyncio.gather(*(complete(http, prompt=f"{i} {PROMPT}", max_tokens=8) for i in range(32)))
        async with http.get("/metrics") as response:
            (cache,) = re.findall(r"^vllm:cache_config_info{(.*)}", await response.text(), re.MULTILINE)
    facts = dict(re.findall(r'(\w+)="(\w+)"', cache))
    pool_bytes = int(facts["num_gpu_blocks"]) * int(facts["block_size"]) * int(facts["kv_bytes_per_token"])
    held = tree_bytes(psutil.Process(daemon.process.pid))
    assert held <= weight_bytes + pool_bytes + 450e6
