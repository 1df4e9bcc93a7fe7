"""The engine process and its host over the real socket, with a scripted engine: requests, questions, start and stop."""

import asyncio
import stat
from pathlib import Path

import psutil
import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.engine_host import EngineHost
from pagedd.daemon.engine_state import EngineState
from pagedd.engine.config import EngineConfig

from .fake_engine import Prompt
from .recorded_host import FAKE_ENGINE, StartHost, request
from .waiting import until


async def test_a_request_gets_its_tokens_and_one_finish(start_host: StartHost) -> None:
    engine = await start_host()
    engine.host.submit(request("a", 5, 7))
    await until(lambda: len(engine.outputs) == 3)
    assert engine.tokens_of("a") == [8, 9, 10]
    assert [output.finish_reason for output in engine.outputs] == [None, None, "length"]


async def test_the_states_on_the_way_to_ready_are_told_in_order(start_host: StartHost) -> None:
    engine = await start_host()
    assert engine.states == [EngineState.STARTING, EngineState.LOADING, EngineState.READY]
    assert engine.host.info is not None
    assert engine.host.info.num_blocks == 6
    assert engine.host.stats is not None
    assert engine.host.stats.num_blocks_free == 6


async def test_the_engine_keeps_the_memory_of_a_step_for_the_next_unless_the_environment_says_otherwise(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4096")
    environ = psutil.Process((await start_host()).host.pid).environ()
    assert environ["MALLOC_MMAP_THRESHOLD_"] == "33554432"
    assert environ["MALLOC_TRIM_THRESHOLD_"] == "4096"
    assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


async def test_an_engine_process_waits_until_it_is_told_what_to_load(tmp_path: Path) -> None:
    host = EngineHost(tmp_path / "engine.sock", FAKE_ENGINE)
    await host.start()
    await until(lambda: host.pid is not None)
    await asyncio.sleep(0.2)
    assert host.state is EngineState.STARTING
    host.load(EngineConfig(model="ok"))
    await until(lambda: host.state is EngineState.READY)
    await host.stop()


async def test_an_aborted_request_produces_no_more_and_the_figures_say_so(start_host: StartHost) -> None:
    engine = await start_host()
    engine.host.submit(request("a", 5, max_tokens=1_000_000))
    await until(lambda: len(engine.outputs) > 2)
    engine.host.abort("a")
    await until(lambda: engine.host.stats is not None and engine.host.stats.num_blocks_used == 0)
    num_outputs = len(engine.outputs)
    # Each step, and the abort: what gives no token is told all the same, for the figures.
    assert engine.num_reports == num_outputs + 1
    await asyncio.sleep(0.05)
    assert len(engine.outputs) == num_outputs


async def test_a_refusal_carries_the_engines_code_and_message(start_host: StartHost) -> None:
    engine = await start_host()
    engine.host.submit(request("a", Prompt.REFUSE))
    await until(lambda: bool(engine.refused))
    assert engine.refused == [("a", "exceeds_kv_pool", "9 blocks, limit 6")]


async def test_a_snapshot_comes_between_steps_and_in_order(start_host: StartHost) -> None:
    engine = await start_host()
    engine.host.submit(request("a", 5, max_tokens=1_000_000))
    first, second = await asyncio.gather(engine.host.snapshot(), engine.host.snapshot())
    assert [sequence.request_id for sequence in first.sequences] == ["a"]
    assert second.stats.steps_total >= first.stats.steps_total


async def test_questions_of_every_kind_get_their_own_answer_in_the_midst_of_steps(start_host: StartHost) -> None:
    host = (await start_host()).host
    host.submit(request("a", 5, max_tokens=1_000_000))
    block, tree, snapshot, none, evicted, unknown = await asyncio.gather(
        host.block(0),
        host.prefixes(10),
        host.snapshot(),
        host.block(6),
        host.evict_prefix(b"d" * 16),
        host.evict_prefix(b"unknown"),
    )
    assert block is not None
    assert (block.state, none) == ("free", None)
    assert [run.token_ids for run in tree.runs] == [(1, 2, 3, 4)]
    assert [sequence.request_id for sequence in snapshot.sequences] == ["a"]
    assert (evicted, unknown) == ((1, 0, 0, 0), None)


async def test_who_was_preempted_is_told_once_with_the_step(start_host: StartHost) -> None:
    engine = await start_host()
    engine.host.submit(request("a", Prompt.PREEMPT))
    await until(lambda: len(engine.tokens_of("a")) == 3)
    assert [(victim.request_id, victim.by_request_id) for victim in engine.preempted] == [("a", "other")]


async def test_the_socket_between_the_processes_is_the_owners_alone(start_host: StartHost, tmp_path: Path) -> None:
    await start_host()
    assert stat.S_IMODE((tmp_path / "engine.sock").stat().st_mode) == 0o600


async def test_stopping_ends_the_engine_and_a_second_stop_does_nothing(start_host: StartHost, tmp_path: Path) -> None:
    engine = await start_host()
    pid = engine.host.pid
    await engine.host.stop()
    await engine.host.stop()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert engine.host.state is EngineState.STOPPED
    assert not (tmp_path / "engine.sock").exists()
    with pytest.raises(PageddError, match=r"^shutting_down"):
        engine.host.submit(request("a", 5))
