"""The engine process and its host over the real socket, with a scripted engine instead of torch."""

import asyncio
import os
import re
import signal
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.engine_child import EngineChild
from pagedd.daemon.engine_host import EngineHost
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.engine_watch import SilenceLimits
from pagedd.daemon.restart_policy import RestartPolicy, on_the_cpu
from pagedd.engine.config import EngineConfig
from pagedd.engine.request import Preemption, Request, SequenceOutput
from pagedd.engine.sampling_params import SamplingParams

from .fake_engine import Prompt

FAKE_ENGINE = (sys.executable, "-P", str(Path(__file__).with_name("fake_engine.py")))


class Recorder:
    """What the service would hear from the host, in order."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self.outputs: list[SequenceOutput] = []
        self.preempted: list[Preemption] = []
        self.refused: list[tuple[str, str, str]] = []
        self.lost: list[str] = []
        self.states: list[EngineState] = []
        self.num_reports = 0
        host.on_preempted = self.preempted.extend
        host.on_outputs = self._heard
        host.on_refused = lambda *refusal: self.refused.append(refusal)
        host.on_lost = self.lost.append
        host.on_state = self._saw_state

    def _heard(self, outputs: list[SequenceOutput]) -> None:
        self.num_reports += 1
        self.outputs += outputs

    def _saw_state(self) -> None:
        if not self.states or self.states[-1] is not self.host.state:
            self.states.append(self.host.state)

    def tokens_of(self, request_id: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == request_id for token in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.005)


def request(request_id: str, *prompt: int, max_tokens: int = 3) -> Request:
    return Request(request_id=request_id, prompt_token_ids=list(prompt), params=SamplingParams(max_tokens=max_tokens))


StartHost = Callable[..., Awaitable[Recorder]]


@pytest.fixture
async def start_host(tmp_path: Path) -> AsyncIterator[StartHost]:
    """Starts a host over the scripted engine; `model` scripts its loading. All are stopped after the test."""
    hosts: list[EngineHost] = []

    async def start(
        model: str = "ok",
        *,
        wait: bool = True,
        command: tuple[str, ...] = FAKE_ENGINE,
        policy: RestartPolicy | None = None,
        silence: SilenceLimits | None = None,
    ) -> Recorder:
        host = EngineHost(tmp_path / "engine.sock", command, policy, silence)
        hosts.append(host)
        recorder = Recorder(host)
        await host.start()
        host.load(EngineConfig(model=model))
        if wait:
            await until(lambda: host.state is EngineState.READY)
        return recorder

    yield start
    for host in hosts:
        await host.stop()


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


async def test_a_request_while_loading_is_refused_with_the_progress(start_host: StartHost) -> None:
    engine = await start_host("slow", wait=False)
    await until(lambda: engine.host.progress >= 0.43)
    with pytest.raises(PageddError, match=r"^engine_loading: loading, (43|86) % \(weights\)"):
        engine.host.submit(request("a", 5))


async def test_an_engine_process_waits_until_it_is_told_what_to_load(tmp_path: Path) -> None:
    host = EngineHost(tmp_path / "engine.sock", FAKE_ENGINE)
    await host.start()
    await until(lambda: host.pid is not None)
    await asyncio.sleep(0.2)
    assert host.state is EngineState.STARTING
    host.load(EngineConfig(model="ok"))
    await until(lambda: host.state is EngineState.READY)
    await host.stop()


async def test_stopping_while_the_engine_loads_takes_no_time(start_host: StartHost) -> None:
    engine = await start_host("slow", wait=False)
    await until(lambda: engine.host.state is EngineState.LOADING)
    pid = engine.host.pid
    assert pid is not None
    async with asyncio.timeout(60):
        await engine.host.stop()
    assert not psutil.pid_exists(pid)
    assert engine.host.state is EngineState.STOPPED


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


@pytest.mark.parametrize("deadly", [Prompt.CRASH, Prompt.VANISH])
async def test_an_engine_that_dies_is_replaced_and_its_loss_told_once(start_host: StartHost, deadly: int) -> None:
    engine = await start_host()
    engine.host.submit(request("a", deadly))
    await until(lambda: engine.host.state is EngineState.RESTARTING)
    with pytest.raises(PageddError, match=r"^engine_died: the engine process \(pid \d+\) ended with status (70|9)"):
        engine.host.submit(request("b", 5))
    await until(lambda: engine.host.state is EngineState.READY)
    assert len(engine.lost) == 1
    engine.host.submit(request("c", 5))
    await until(lambda: engine.tokens_of("c") == [6, 7, 8])
    assert ("scripted fault" in engine.host.trace) == (deadly is Prompt.CRASH)


async def test_a_killed_engine_is_named_with_its_signal(start_host: StartHost) -> None:
    engine = await start_host()
    assert engine.host.pid is not None
    os.kill(engine.host.pid, signal.SIGKILL)
    await until(lambda: bool(engine.lost))
    assert "was ended by SIGKILL" in engine.lost[0]


async def test_a_snapshot_that_waits_for_a_dying_engine_fails(start_host: StartHost) -> None:
    engine = await start_host()
    engine.host.submit(request("a", Prompt.HANG))
    # Time to begin the step that never ends; commands that arrive together are all obeyed before it.
    await asyncio.sleep(0.2)
    answer = asyncio.ensure_future(engine.host.snapshot())
    await asyncio.sleep(0)
    assert engine.host.pid is not None
    os.kill(engine.host.pid, signal.SIGKILL)
    with pytest.raises(PageddError, match=r"^engine_died"):
        await answer


@pytest.mark.parametrize("how", ["step", "stopped"])
async def test_an_engine_that_hangs_stalls_and_is_replaced(start_host: StartHost, how: str) -> None:
    engine = await start_host(silence=SilenceLimits(stalled_s=2, hung_s=3))
    first = engine.host.pid
    assert first is not None
    if how == "step":
        engine.host.submit(request("a", Prompt.HANG))
    else:
        os.kill(first, signal.SIGSTOP)
    await until(lambda: engine.host.state is EngineState.STALLED)
    with pytest.raises(PageddError, match=r"^engine_stalled: no step has ended for over 2 s; try again shortly"):
        engine.host.submit(request("b", 5))
    await until(lambda: engine.host.state is EngineState.READY and engine.host.pid != first)
    assert engine.lost == [f"the engine process (pid {first}) hung: no step ended within 3 s"]
    assert not psutil.pid_exists(first)
    if how == "step":
        assert re.search(r"fake_engine\.py.* in step", engine.host.trace)
    engine.host.submit(request("c", 5))
    await until(lambda: engine.tokens_of("c") == [6, 7, 8])


async def test_an_engine_that_only_stalls_goes_on_and_loses_nothing(start_host: StartHost) -> None:
    engine = await start_host(silence=SilenceLimits(stalled_s=2, hung_s=60))
    pid = engine.host.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: engine.host.state is EngineState.STALLED)
    os.kill(pid, signal.SIGCONT)
    await until(lambda: engine.host.state is EngineState.READY)
    assert engine.host.pid == pid
    assert engine.lost == []


async def test_an_idle_engine_is_alive_for_as_long_as_it_is_idle(start_host: StartHost) -> None:
    engine = await start_host(silence=SilenceLimits(stalled_s=1.8, hung_s=2))
    await asyncio.sleep(3.5)
    assert engine.states == [EngineState.STARTING, EngineState.LOADING, EngineState.READY]


async def test_a_load_that_hangs_is_tried_again_and_given_up(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    engine = await start_host("slow", wait=False, silence=SilenceLimits(load_s=1))
    await until(lambda: engine.host.state is EngineState.FAILED)
    assert engine.host.num_restarts == 2
    assert "hung: its load did not get on for 1 s (weights)" in engine.host.detail


async def test_an_engine_that_cannot_be_ended_is_a_failure(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.engine_child._KILL_TIMEOUT_S", 0.1)
    engine = await start_host(silence=SilenceLimits(stalled_s=1.5, hung_s=2))
    # As while a driver holds it in the kernel.
    monkeypatch.setattr(EngineChild, "kill", lambda child: None)
    pid = engine.host.pid
    engine.host.submit(request("a", Prompt.HANG))
    await until(lambda: engine.host.state is EngineState.FAILED)
    assert engine.host.failure is not None
    assert str(engine.host.failure) == f"engine_failed: the hung engine process (pid {pid}) cannot be ended"
    assert len(engine.lost) == 1
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_an_engine_that_sleeps_has_no_process_until_it_is_woken(start_host: StartHost) -> None:
    engine = await start_host()
    pid = engine.host.pid
    slept: list[bool] = []
    engine.host.on_ended = lambda: slept.append(True)
    engine.host.begin_sleep()
    await engine.host.sleep()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert engine.host.state is EngineState.ASLEEP
    assert (slept, engine.lost, engine.host.num_restarts) == ([True], [], 0)
    with pytest.raises(PageddError, match=r"^engine_asleep"):
        engine.host.submit(request("a", 5))
    engine.host.wake()
    await until(lambda: engine.host.state is EngineState.READY)
    assert not engine.host.is_sleeping
    engine.host.submit(request("b", 5))
    await until(lambda: engine.tokens_of("b") == [6, 7, 8])


async def test_the_caches_quality_is_measured_by_the_first_engine_and_known_to_those_after_it(
    start_host: StartHost,
) -> None:
    engine = await start_host("checks")
    first_pid = engine.host.pid
    engine.host.begin_sleep()
    await engine.host.sleep()
    engine.host.wake()
    await until(lambda: engine.host.state is EngineState.READY)
    assert engine.host.pid != first_pid
    assert engine.host.info is not None
    assert engine.host.info.kv_quality is not None
    assert engine.host.info.kv_quality.num_tokens == first_pid


async def test_a_host_stops_while_its_engine_sleeps(start_host: StartHost) -> None:
    engine = await start_host()
    engine.host.begin_sleep()
    await engine.host.sleep()
    await engine.host.stop()
    assert engine.host.state is EngineState.STOPPED
    assert engine.host.pid is None


async def test_an_engine_that_hangs_is_put_to_sleep_all_the_same_and_is_lost(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.engine_lives._EXIT_TIMEOUT_S", 0.1)
    engine = await start_host()
    pid = engine.host.pid
    ended: list[bool] = []
    engine.host.on_ended = lambda: ended.append(True)
    engine.host.submit(request("a", Prompt.HANG))
    await asyncio.sleep(0.05)
    engine.host.begin_sleep()
    await engine.host.sleep()
    assert engine.host.state is EngineState.ASLEEP
    assert engine.lost == [f"the engine process (pid {pid}) hung: it did not end within 0.1 s of being told to"]
    assert ended == []
    assert re.search(r"fake_engine\.py.* in step", engine.host.trace)


@pytest.mark.parametrize("deadly", [Prompt.CRASH, Prompt.VANISH])
async def test_an_engine_that_dies_before_it_sleeps_is_lost_and_no_other_starts_until_it_is_woken(
    start_host: StartHost, deadly: int
) -> None:
    engine = await start_host()
    ended: list[bool] = []
    engine.host.on_ended = lambda: ended.append(True)
    engine.host.begin_sleep()
    pid = engine.host.pid
    engine.host.submit(request("a", deadly))
    await until(lambda: engine.host.state is EngineState.ASLEEP)
    await engine.host.sleep()
    assert (len(engine.lost), ended, engine.host.num_restarts) == (1, [], 1)
    assert f"(pid {pid}) ended with status" in engine.host.detail
    engine.host.wake()
    await until(lambda: engine.host.state is EngineState.READY)
    engine.host.submit(request("b", 5))
    await until(lambda: engine.tokens_of("b") == [6, 7, 8])


@pytest.mark.parametrize("how", ["sleep", "stop"])
async def test_an_engine_that_dies_of_its_exit_is_lost(start_host: StartHost, how: str) -> None:
    engine = await start_host("ok-until-exit")
    if how == "sleep":
        engine.host.begin_sleep()
        await engine.host.sleep()
    else:
        await engine.host.stop()
    assert len(engine.lost) == 1
    assert "ended with status 70" in engine.lost[0]


async def test_putting_an_engine_to_sleep_that_cannot_be_ended_fails(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.engine_lives._EXIT_TIMEOUT_S", 0.1)
    monkeypatch.setattr("pagedd.daemon.engine_child._KILL_TIMEOUT_S", 0.1)
    engine = await start_host()
    monkeypatch.setattr(EngineChild, "kill", lambda child: None)
    pid = engine.host.pid
    engine.host.submit(request("a", Prompt.HANG))
    await asyncio.sleep(0.05)
    engine.host.begin_sleep()
    async with asyncio.timeout(60):
        with pytest.raises(PageddError, match=r"^engine_failed: .* cannot be ended"):
            await engine.host.sleep()
    assert not engine.host.is_sleeping
    assert len(engine.lost) == 1
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_a_hung_engine_is_killed_when_the_host_stops(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.engine_lives._EXIT_TIMEOUT_S", 0.1)
    engine = await start_host()
    pid = engine.host.pid
    engine.host.submit(request("a", Prompt.HANG))
    await asyncio.sleep(0.05)
    await engine.host.stop()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert len(engine.lost) == 1


async def test_a_host_stops_although_its_engine_cannot_be_ended(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.engine_lives._EXIT_TIMEOUT_S", 0.1)
    monkeypatch.setattr("pagedd.daemon.engine_child._KILL_TIMEOUT_S", 0.1)
    engine = await start_host()
    monkeypatch.setattr(EngineChild, "kill", lambda child: None)
    pid = engine.host.pid
    engine.host.submit(request("a", Prompt.HANG))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        await engine.host.stop()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_a_fault_of_the_settings_is_not_tried_again(start_host: StartHost) -> None:
    engine = await start_host("error:unsupported_model", wait=False)
    await until(lambda: engine.host.state is EngineState.FAILED)
    assert engine.host.failure is not None
    assert engine.host.failure.code == "unsupported_model"
    assert engine.host.num_restarts == 0
    with pytest.raises(PageddError, match=r"^engine_failed: unsupported_model: scripted"):
        engine.host.submit(request("a", 5))


@pytest.mark.parametrize("model", ["vanish", "fault", "error:engine_died"])
async def test_an_engine_that_never_loads_is_given_up_after_three_tries(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    engine = await start_host(model, wait=False)
    await until(lambda: engine.host.state is EngineState.FAILED)
    assert engine.host.num_restarts == 2
    assert engine.lost == []


async def test_where_the_device_stays_away_the_cpu_serves_and_it_is_said(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("pagedd.daemon.restart_policy.DEVICE_PATIENCE_S", 0.02)
    engine = await start_host("away", policy=RestartPolicy(can_fall_back=True))
    assert engine.host.has_fallen_back
    (said,) = [record for record in caplog.records if "the CPU serves in its place until" in record.getMessage()]
    assert said.levelname == "WARNING"
    assert "starting another" not in said.getMessage()
    engine.host.submit(request("a", 5))
    await until(lambda: engine.tokens_of("a") == [6, 7, 8])


async def test_a_device_that_is_late_and_later_lost_is_waited_for_each_time(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("pagedd.daemon.restart_policy._MAX_DELAY_S", 0.01)
    absence = tmp_path / "absent"
    absence.touch()
    engine = await start_host(f"away-while:{absence}", wait=False)
    await until(lambda: engine.host.num_restarts >= 2)
    with pytest.raises(PageddError, match=r"^engine_(died|loading)"):
        engine.host.submit(request("early", 5))
    absence.unlink()
    await until(lambda: engine.host.state is EngineState.READY)

    absence.touch()  # as after a suspend: every call fails, and so does every load
    engine.host.submit(request("a", Prompt.LOSE_DEVICE))
    before = engine.host.num_restarts
    await until(lambda: engine.host.num_restarts >= before + 2)
    absence.unlink()
    await until(lambda: engine.host.state is EngineState.READY)
    assert len(engine.lost) == 1, "what ran is told once, however many loads failed after it"
    assert not engine.host.has_fallen_back
    engine.host.submit(request("b", 5))
    await until(lambda: engine.tokens_of("b") == [6, 7, 8])


async def test_a_device_that_is_away_when_a_sleeper_is_woken_is_waited_for_however_long(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("pagedd.daemon.restart_policy._MAX_DELAY_S", 0.01)
    monkeypatch.setattr("pagedd.daemon.restart_policy.DEVICE_PATIENCE_S", 0.02)
    absence = tmp_path / "absent"
    engine = await start_host(f"away-while:{absence}")
    engine.host.begin_sleep()
    await engine.host.sleep()
    absence.touch()
    engine.host.wake()
    await until(lambda: engine.host.num_restarts >= 3 or engine.host.state is EngineState.FAILED)
    absence.unlink()
    await until(lambda: engine.host.state in (EngineState.READY, EngineState.FAILED))
    assert engine.host.state is EngineState.READY


def test_what_was_meant_for_a_card_does_not_bind_the_cpu() -> None:
    config = EngineConfig(
        model="m", device="cuda:1", kv_cache_dtype="fp16", gpu_memory_utilization=0.95, max_num_seqs=7
    )
    assert on_the_cpu(config) == EngineConfig(model="m", device="cpu", max_num_seqs=7)


async def test_a_load_that_fails_once_is_tried_again(start_host: StartHost, tmp_path: Path) -> None:
    engine = await start_host(f"vanish-once:{tmp_path / 'tried'}")
    assert engine.host.num_restarts == 1
    assert engine.lost == []


async def test_a_program_that_cannot_be_started_is_a_failure_with_its_reason(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    engine = await start_host(wait=False, command=("/nonexistent",))
    await until(lambda: engine.host.state is EngineState.FAILED)
    assert "could not be started" in engine.host.detail


async def test_a_socket_that_cannot_be_bound_is_a_failure_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.restart_policy._FIRST_DELAY_S", 0.01)
    host = EngineHost(tmp_path / "nowhere" / "engine.sock", FAKE_ENGINE)
    await host.start()
    await until(lambda: host.state is EngineState.FAILED)
    assert "could not be started" in host.detail
    await host.stop()


async def test_a_listener_that_breaks_does_not_keep_the_next_engine_from_starting(start_host: StartHost) -> None:
    engine = await start_host()

    def break_down(reason: str) -> None:
        raise ZeroDivisionError

    engine.host.on_lost = break_down
    engine.host.submit(request("a", Prompt.CRASH))
    await until(lambda: engine.host.num_restarts == 1 and engine.host.state is EngineState.READY)


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
