"""The load client: the work it makes is pinned, and what it counts is what a server sent."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from pagedd.bench.load import LoadClient, LoadRequest, make_load, percentile


def test_loads_are_the_ones_that_published_figures_were_measured_with():
    throughput = make_load("throughput", 64)
    assert [len(r.prompt_token_ids) for r in throughput[:4]] == [114, 219, 183, 103]
    assert [r.num_output_tokens for r in throughput[:4]] == [39, 51, 43, 52]
    assert throughput[0].prompt_token_ids[:4] == [9896, 25885, 42669, 3174]
    assert sum(sum(r.prompt_token_ids) for r in throughput) == 235068335
    assert sum(r.num_output_tokens for r in throughput) == 4689
    assert make_load("single", 4)[3].prompt_token_ids[-3:] == [8500, 27682, 44310]
    assert sum(sum(r.prompt_token_ids) for r in make_load("prefix", 32)) == 418486274
    assert make_load("longprompt", 8)[7].prompt_token_ids[-3:] == [7302, 8841, 17949]


def test_prefix_requests_share_512_tokens_and_differ_in_32():
    load = make_load("prefix", 3)
    assert len({tuple(r.prompt_token_ids[:512]) for r in load}) == 1
    assert len({tuple(r.prompt_token_ids[512:]) for r in load}) == 3
    assert {len(r.prompt_token_ids) for r in load} == {544}


def test_percentiles_are_values_that_occurred():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([], 0.5) is None


class ScriptedServer:
    """Answers `/v1/completions` with one chunk a token, and knows how many requests it had at once."""

    def __init__(self, *, sends_usage: bool = True, status: int = 200, events: list[dict] | None = None) -> None:
        self.bodies: list[dict] = []
        self.most_at_once = 0
        self._at_once = 0
        self._sends_usage = sends_usage
        self._status = status
        self._events = events

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self._status != 200:
            return web.json_response({"error": {"code": "queue_full"}}, status=self._status)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events = self._events
        if events is None:
            events = [{"choices": [{"text": "x"}], "usage": None}] * body["max_tokens"]
            if self._sends_usage:
                events.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        self._at_once -= 1
        return response

    async def run(self, socket: Path, load: list[LoadRequest], **settings: int):
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(socket)).start()
        try:
            return await LoadClient("http://localhost", unix_socket=str(socket)).run(load, **settings)
        finally:
            await runner.cleanup()


LOAD = [LoadRequest([11, 12, 13], 4), LoadRequest([14], 2), LoadRequest([15, 16], 3)]


@pytest.mark.parametrize("sends_usage", [True, False])
async def test_tokens_times_and_gaps_are_counted_for_each_request(tmp_path: Path, sends_usage: bool):
    result = await ScriptedServer(sends_usage=sends_usage).run(tmp_path / "s", LOAD, num_warmups=0)
    assert [t.num_output_tokens for t in result.timings] == [4, 2, 3]
    assert [len(t.gaps_s) for t in result.timings] == [3, 1, 2]
    assert all(0 < t.ttft_s <= t.e2e_s for t in result.timings)
    figures = result.figures()
    assert figures["num_prompt_tokens"] == 6
    assert figures["num_output_tokens"] == figures["num_output_tokens_asked"] == 9


async def test_at_most_so_many_requests_run_at_once(tmp_path: Path):
    server = ScriptedServer()
    await server.run(tmp_path / "s", LOAD * 4, concurrency=2, num_warmups=1)
    assert server.most_at_once == 2
    assert len(server.bodies) == 13


async def test_outputs_have_the_length_asked_for_on_any_server(tmp_path: Path):
    server = ScriptedServer()
    await server.run(tmp_path / "s", LOAD[:1], num_warmups=0)
    (body,) = server.bodies
    assert body["prompt"] == [11, 12, 13]
    assert body["max_tokens"] == 4
    assert body["temperature"] == 0
    assert body["ignore_eos"] is True
    assert body["stream"] is True


async def test_a_refusal_ends_the_measurement(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"HTTP 429: .*queue_full"):
        await ScriptedServer(status=429).run(tmp_path / "s", LOAD)


async def test_an_error_inside_a_stream_ends_the_measurement(tmp_path: Path):
    events = [{"choices": [{"text": "x"}]}, {"error": {"code": "engine_died"}}]
    with pytest.raises(RuntimeError, match="engine_died"):
        await ScriptedServer(events=events).run(tmp_path / "s", LOAD)


async def test_a_stream_without_tokens_ends_the_measurement(tmp_path: Path):
    with pytest.raises(RuntimeError, match="ended without one"):
        await ScriptedServer(events=[]).run(tmp_path / "s", LOAD)
