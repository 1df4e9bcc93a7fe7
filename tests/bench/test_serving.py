"""pagedd against peers: what is made of the turns, who is left out, and that no load helps another."""

import argparse
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil
import pytest

from pagedd.bench.load import LoadRequest, make_load
from pagedd.bench.servers import LoadOutcome, RunningServer, Server
from pagedd.bench.serving import CONCURRENCY, Turn, choose_servers, load_seed, rate, run_rounds, summarize


def turn(server: str, output_rate: float, *, peak_mb: float = 100.0, ttft_s: float | None = None) -> Turn:
    """Single: 10 s at `output_rate`; long prompts: the same output, and nine times as many prompt tokens."""
    num_output_tokens = round(10 * output_rate)
    single = LoadOutcome(10.0, 500, num_output_tokens, ttft_s)
    long = LoadOutcome(10.0, 9 * num_output_tokens, num_output_tokens, ttft_s)
    return Turn(server, {"single": single, "longprompt": long}, peak_mb, ready_s=2.0)


def test_the_ratio_is_to_the_best_peer_by_medians_and_ranges_over_rounds():
    turns = [
        *(turn("pagedd", 300, ttft_s=0.020), turn("llama.cpp", 200, ttft_s=0.1), turn("vllm", 60)),
        *(turn("pagedd", 330, ttft_s=0.030), turn("llama.cpp", 240, ttft_s=0.1), turn("vllm", 61)),
        *(turn("pagedd", 250, ttft_s=0.010), turn("llama.cpp", 100, ttft_s=0.1), turn("vllm", 900)),
    ]
    rows, figures = summarize(turns, ["single"])
    assert rows[0] == {
        "load": "single",
        "pagedd": 300.0,
        "llama.cpp": 200.0,
        "vllm": 61.0,
        "best peer": "llama.cpp",
        "ratio": "1.50 (1.38–2.50)",
        "target": 1.25,
    }
    single = figures["by_load"]["single"]
    assert single["ratio"] == {"median": 1.5, "min": 1.375, "max": 2.5}
    assert single["servers"]["pagedd"] == {"median": 300.0, "rounds": [300.0, 330.0, 250.0], "ttft_p50_ms": 20.0}
    assert single["servers"]["vllm"]["ttft_p50_ms"] is None


def test_long_prompts_count_prompt_tokens_and_the_others_do_not():
    outcome = LoadOutcome(duration_s=2.0, num_prompt_tokens=90, num_output_tokens=10, ttft_p50_s=None)
    assert rate("longprompt", outcome) == 50.0
    assert [rate(kind, outcome) for kind in ("single", "throughput", "prefix")] == [5.0, 5.0, 5.0]


def test_memory_is_the_largest_of_all_rounds():
    rows, figures = summarize([turn("pagedd", 1, peak_mb=300.4), turn("pagedd", 1, peak_mb=200.0)], ["single"])
    assert rows[1]["pagedd"] == 300.4
    assert figures["peak_memory_mb"] == {"pagedd": 300}


def test_without_a_peer_there_is_no_ratio():
    rows, figures = summarize([turn("pagedd", 300)], ["single", "longprompt"])
    assert [row["ratio"] for row in rows[:2]] == ["n/a", "n/a"]
    assert figures["by_load"]["longprompt"]["best_peer"] is None


def test_no_prompt_of_one_load_or_round_begins_another():
    first_tokens = [
        tuple(request.prompt_token_ids[:16])
        for round_number in range(3)
        for kind in CONCURRENCY
        for request in make_load(kind, 1, seed=load_seed(7 + round_number, kind))
    ]
    assert len(set(first_tokens)) == 12


class EchoServer:
    """Does what it is asked at once, or fails at a load."""

    pid = psutil.Process().pid
    ready_s = 0.5

    def __init__(self, name: str, log: list[str], *, fails: bool = False) -> None:
        self._name, self._log, self._fails = name, log, fails

    @contextlib.asynccontextmanager
    async def start(self) -> AsyncIterator[RunningServer]:
        self._log.append(f"{self._name} up")
        try:
            yield self
        finally:
            self._log.append(f"{self._name} down")

    async def run(self, load: Sequence[LoadRequest], *, concurrency: int) -> LoadOutcome:
        if self._fails:
            raise RuntimeError("asked for 4 tokens, got 3")
        self._log.append(f"{self._name} {len(load)} by {concurrency}")
        return LoadOutcome(1.0, 1, 1, None)

    def as_server(self, *needs: Path) -> Server:
        return Server(self._name, needs, self.start)


def settings(**changes: object) -> argparse.Namespace:
    usual = {"rounds": 2, "loads": ["single"], "num_requests": {"single": 4}, "seed": 7}
    return argparse.Namespace(**(usual | changes))


async def test_rounds_take_the_servers_in_turn_and_one_is_down_before_the_next_is_up():
    log: list[str] = []
    servers = [EchoServer(name, log).as_server() for name in ("pagedd", "vllm")]
    turns, failures = await run_rounds(servers, settings())
    assert log == ["pagedd up", "pagedd 4 by 1", "pagedd down", "vllm up", "vllm 4 by 1", "vllm down"] * 2
    assert [turn.server for turn in turns] == ["pagedd", "vllm"] * 2
    assert failures == {}


async def test_a_peer_that_fails_is_stopped_and_left_out_with_the_reason():
    log: list[str] = []
    servers = [EchoServer("vllm", log, fails=True).as_server(), EchoServer("pagedd", log).as_server()]
    turns, failures = await run_rounds(servers, settings())
    assert log[:2] == ["vllm up", "vllm down"]
    assert log.count("vllm up") == 1
    assert [turn.server for turn in turns] == ["pagedd", "pagedd"]
    assert failures == {"vllm": "RuntimeError: asked for 4 tokens, got 3"}


async def test_a_failure_of_pagedd_itself_ends_the_measurement():
    with pytest.raises(RuntimeError, match="got 3"):
        await run_rounds([EchoServer("pagedd", [], fails=True).as_server()], settings())


def test_absent_peers_are_skipped_and_said(tmp_path: Path):
    servers = [EchoServer("pagedd", []).as_server(tmp_path), EchoServer("vllm", []).as_server(tmp_path / "vllm")]
    present, skipped = choose_servers(servers, None)
    assert [server.name for server in present] == ["pagedd"]
    assert skipped == {"vllm": f"{tmp_path / 'vllm'} not found"}
    assert choose_servers(servers, ["pagedd"])[1] == {}


def test_a_server_that_nobody_knows_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no server is called ollama; there are pagedd"):
        choose_servers([EchoServer("pagedd", []).as_server(tmp_path)], ["ollama"])
