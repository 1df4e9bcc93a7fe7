"""The daemon's life, as a process: start, load, serve, and every way to end. The engine is scripted."""

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest
import zmq

from pagedd.client.endpoints import Endpoints, ipc
from pagedd.client.errors import PageddError
from pagedd.client.protocol import PROTOCOL_VERSION, Generate, Sampling, encode
from pagedd.client.sync import Client
from pagedd.daemon.http_connection import max_connections
from pagedd.daemon.server import how_to_talk, wait_for_fault

from .conftest import RunningDaemon, StartDaemon
from .fake_engine import Prompt


def completion(daemon: RunningDaemon, token_ids: list[int], max_tokens: int = 3, **fields: object) -> tuple[int, str]:
    body = {"prompt": token_ids, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    return daemon.request("POST", "/v1/completions", json.dumps(body))


class InBackground(threading.Thread):
    """A request of its own thread; `answer` is there after `join`."""

    def __init__(self, daemon: RunningDaemon, token_ids: list[int], max_tokens: int, **fields: object) -> None:
        super().__init__(daemon=True)
        self._request = (daemon, token_ids, max_tokens)
        self._fields = fields
        self.answer = (0, "")
        self.start()
        if token_ids != [Prompt.HANG]:  # of a step that never ends nothing is told
            daemon.wait_until(is_busy)

    def run(self) -> None:
        with suppress(OSError, HTTPException):  # a test may end the daemon under it
            self.answer = completion(*self._request, **self._fields)


def is_busy(daemon: RunningDaemon) -> bool:
    return metric(daemon, "vllm:num_requests_running") > 0


def metric(daemon: RunningDaemon, name: str) -> float:
    lines = daemon.get("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def engine_of(daemon: RunningDaemon) -> psutil.Process:
    children = psutil.Process(daemon.process.pid).children()
    return next(child for child in children if "--link" in child.cmdline())


def test_sockets_answer_while_the_model_loads_and_systemd_hears_how_far_it_is(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(fake_engine=True, environ={"FAKE_ENGINE_LOAD": "slow"})
    daemon.wait_until(lambda daemon: "86 %" in daemon.get("/health")[1])
    assert daemon.get("/health")[0] == 200
    status, body = completion(daemon, [5])
    assert (status, json.loads(body)["error"]["code"]) == (503, "engine_loading")
    assert "loading, 86 %" in body
    daemon.wait_until(lambda daemon: "STATUS=loading, 86 % (weights)" in daemon.notified())
    heard = daemon.notified()
    assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in heard)
    assert "READY=1" not in heard


def test_a_client_waits_for_the_model_and_then_gets_its_answer(start_daemon: StartDaemon, tmp_path: Path) -> None:
    may_be_ready = tmp_path / "ready"
    daemon = start_daemon(fake_engine=True, environ={"FAKE_ENGINE_LOAD": f"until:{may_be_ready}"})
    daemon.wait_until(lambda daemon: daemon.get("/health")[0] == 200)
    with Client(daemon.endpoints.directory, on_load_wait=may_be_ready.touch) as client:
        done = client.generate(prompt_token_ids=[5], max_tokens=2).result()
    assert done.choices[0].token_ids == [6, 7]


def test_systemd_hears_once_that_the_daemon_is_ready(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(fake_engine=True).wait_ready()
    assert completion(daemon, [5])[0] == 200
    assert daemon.stop() == 0
    heard = daemon.notified()
    assert heard.count("READY=1") == 1
    assert heard.index("READY=1") < heard.index("STOPPING=1")


def test_a_signal_ends_an_idle_daemon_with_its_engine_and_sockets(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(fake_engine=True).wait_ready()
    engine = engine_of(daemon)
    assert daemon.stop(signal.SIGINT) == 0
    assert not engine.is_running()
    assert [path.name for path in daemon.endpoints.directory.iterdir()] == ["pagedd.lock"]
    assert "crash report" not in daemon.log


def test_a_signal_during_the_load_ends_the_daemon_at_once(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(fake_engine=True, environ={"FAKE_ENGINE_LOAD": "slow"})
    daemon.wait_until(lambda daemon: "86 %" in daemon.get("/health")[1])
    engine = engine_of(daemon)
    assert daemon.stop() == 0
    assert not engine.is_running()


def test_a_running_request_may_finish_after_the_signal_and_new_ones_are_refused(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--drain-seconds", "60", fake_engine=True).wait_ready()
    running = InBackground(daemon, [Prompt.SLOW], max_tokens=100)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_until(lambda daemon: "finishing" in daemon.log)
    status, body = completion(daemon, [6])
    assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
    assert daemon.process.wait(30) == 0
    running.join()
    assert running.answer[0] == 200
    assert json.loads(running.answer[1])["usage"]["completion_tokens"] == 100


def test_a_request_that_outlives_the_drain_gets_its_terminal_message(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--drain-seconds", "0.2", fake_engine=True).wait_ready()
    running = InBackground(daemon, [Prompt.SLOW], max_tokens=2000)
    assert daemon.stop() == 0
    running.join()
    assert (running.answer[0], json.loads(running.answer[1])["error"]["code"]) == (503, "shutting_down")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_reaches_the_engine_too_is_left_to_the_front(
    start_daemon: StartDaemon, number: signal.Signals
) -> None:
    daemon = start_daemon(fake_engine=True).wait_ready()
    running = InBackground(daemon, [Prompt.SLOW], max_tokens=50)
    engine = engine_of(daemon)
    engine.send_signal(number)
    running.join()
    assert running.answer[0] == 200
    assert engine.is_running()


def test_a_second_signal_ends_everything_at_once(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--drain-seconds", "3000", fake_engine=True).wait_ready()
    engine = engine_of(daemon)
    InBackground(daemon, [Prompt.SLOW], max_tokens=2000)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_until(lambda daemon: "finishing" in daemon.log)
    assert daemon.stop() == 128 + signal.SIGTERM
    engine.wait(10)


def test_clients_of_every_kind_hear_their_end_or_hold_nothing_up(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--drain-seconds", "0.5", fake_engine=True).wait_ready()
    with zmq.Context() as context, ExitStack() as stack:
        for number in range(3):  # clients that never read
            client = stack.enter_context(context.socket(zmq.DEALER))
            client.connect(ipc(daemon.endpoints.requests))
            sampling = Sampling(max_tokens=2000, ignore_eos=True)
            message = Generate(id=str(number), prompt_token_ids=[Prompt.SLOW], sampling=sampling)
            client.send_multipart([PROTOCOL_VERSION, encode(message)])
            client.setsockopt(zmq.LINGER, 0)
        streams = [InBackground(daemon, [Prompt.SLOW, 500], max_tokens=2000, stream=True) for _ in range(2)]
        daemon.wait_until(lambda daemon: metric(daemon, "vllm:num_requests_running") == 5)
        long = InBackground(daemon, [Prompt.HANG], max_tokens=3)  # a step that does not end, as a long prefill
        assert daemon.stop(timeout_s=20) == 0
    for stream in streams:
        stream.join()
        assert stream.answer[0] == 200
        assert "shutting_down" in stream.answer[1].split("\n\n")[-2]
    long.join()
    assert (long.answer[0], json.loads(long.answer[1])["error"]["code"]) == (503, "shutting_down")


def test_a_daemon_that_nobody_asks_takes_less_than_a_hundredth_of_a_core(serving_daemon: RunningDaemon) -> None:
    front = psutil.Process(serving_daemon.process.pid)
    processes = [front, *front.children(recursive=True)]

    def cpu_seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = cpu_seconds()
    time.sleep(6)
    # The kernel counts in hundredths of a second, each process for itself.
    assert cpu_seconds() - before <= 0.06 + 0.01 * len(processes)
    assert completion(serving_daemon, [5])[0] == 200


def test_the_engine_dies_with_a_killed_front_and_the_next_daemon_starts(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(fake_engine=True).wait_ready()
    engine = engine_of(daemon)
    assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    engine.wait(10)
    assert daemon.endpoints.http.exists()
    again = start_daemon(fake_engine=True).wait_ready()
    assert completion(again, [5])[0] == 200


def test_the_front_survives_the_engine_and_serves_again(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(fake_engine=True).wait_ready()
    status, body = completion(daemon, [Prompt.CRASH])
    assert (status, json.loads(body)["error"]["code"]) == (503, "engine_died")
    daemon.wait_ready()
    assert completion(daemon, [5])[0] == 200
    assert "scripted fault" in daemon.log


def test_a_step_that_hangs_ends_its_request_and_not_the_daemon(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--step-timeout-seconds", "8", fake_engine=True).wait_ready()
    hung = InBackground(daemon, [Prompt.HANG], max_tokens=3)
    daemon.wait_until(lambda daemon: json.loads(daemon.get("/health")[1])["state"] == "stalled")
    assert daemon.get("/health")[0] == 200
    status, body = daemon.get("/ready")
    assert (status, json.loads(body)["error"]["code"]) == (503, "engine_stalled")
    hung.join()
    assert (hung.answer[0], json.loads(hung.answer[1])["error"]["code"]) == (503, "engine_died")
    daemon.wait_ready()
    assert completion(daemon, [5])[0] == 200


def test_the_device_is_left_to_a_program_that_is_named(start_daemon: StartDaemon, tmp_path: Path) -> None:
    game = tmp_path / "pagedd-game"
    game.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(game), "600"])
    try:
        daemon = start_daemon("--yield-to", "chess, pagedd-game", fake_engine=True)
        daemon.wait_until(lambda daemon: json.loads(daemon.get("/health")[1])["state"] == "yielding")
        daemon.wait_until(lambda daemon: "its process has ended" in daemon.log)
        status, body = daemon.request("POST", "/v1/completions", json.dumps({"prompt": "x"}))
        assert (status, json.loads(body)["error"]["code"]) == (503, "device_yielded")
        assert "pagedd-game runs" in body
    finally:
        process.kill()
        process.wait()


def test_an_idle_engine_sleeps_and_the_next_request_wakes_it(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--idle-sleep-seconds", "0.5", fake_engine=True).wait_ready()
    daemon.wait_until(lambda daemon: json.loads(daemon.get("/health")[1])["state"] == "asleep")
    assert not any("--link" in child.cmdline() for child in psutil.Process(daemon.process.pid).children())
    assert daemon.get("/ready")[0] == 200
    assert completion(daemon, [5])[0] == 200
    assert daemon.stop() == 0
    said = [line for line in daemon.log.splitlines() if re.search("ready: |no request for|sleeps|wakes", line)]
    expected = ["ready: ", "no request for 0.5 s", "the engine sleeps", "the engine wakes: a request came", "ready: "]
    assert all(words in line for words, line in zip(expected, said, strict=False))


def test_systemds_watchdog_is_fed_by_the_loop_and_only_by_it(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(fake_engine=True, environ={"WATCHDOG_USEC": "300000"}).wait_ready()
    num_fed = daemon.notified().count("WATCHDOG=1")
    daemon.wait_until(lambda daemon: daemon.notified().count("WATCHDOG=1") > num_fed + 2)
    daemon.process.send_signal(signal.SIGABRT)
    assert daemon.process.wait(10) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in daemon.log
    assert "in run" in daemon.log


def test_a_second_daemon_in_the_same_directory_is_refused_and_disturbs_nothing(start_daemon: StartDaemon) -> None:
    first = start_daemon(fake_engine=True).wait_ready()
    second = start_daemon(fake_engine=True)
    assert second.process.wait(30) == os.EX_TEMPFAIL
    assert f"already_running: another pagedd (pid {first.process.pid}) serves {first.endpoints.directory}" in second.log
    assert completion(first, [5])[0] == 200


def test_an_engine_that_cannot_have_its_settings_ends_the_daemon_with_their_status(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(fake_engine=True, environ={"FAKE_ENGINE_LOAD": "error:unsupported_model"})
    assert daemon.process.wait(60) == os.EX_CONFIG
    assert "unsupported_model: scripted" in daemon.log


def test_a_model_that_is_not_there_ends_the_daemon_with_a_status_of_its_own(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--model", "/nonexistent.gguf", fake_engine=True)
    assert daemon.process.wait(60) == os.EX_UNAVAILABLE
    assert (
        daemon.log
        == "pagedd: model_unavailable: '/nonexistent.gguf': there is no such file or folder; check the path\n"
    )


def test_a_port_that_is_taken_is_a_fault_of_the_settings(start_daemon: StartDaemon, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("0123456789abcdef0123456789abcdef\n")
    key_file.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        daemon = start_daemon("--http-port", port, "--api-key-file", str(key_file), fake_engine=True)
        assert daemon.process.wait(60) == os.EX_CONFIG
    assert f"invalid_setting: http_port {port} on 127.0.0.1: Address already in use; choose another" in daemon.log


@pytest.mark.parametrize("flags", [["--max-num-seq", "3"], ["--block-size", "12"]])
def test_a_wrong_flag_ends_the_daemon_before_it_begins(start_daemon: StartDaemon, flags: list[str]) -> None:
    daemon = start_daemon(*flags, fake_engine=True)
    assert daemon.process.wait(30) == os.EX_CONFIG
    assert not daemon.endpoints.directory.exists()


def test_a_shells_small_limit_of_descriptors_is_raised_and_http_may_have_half_of_it(start_daemon: StartDaemon) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        daemon = start_daemon(fake_engine=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    daemon.wait_ready()
    assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (min(hard, 65_536), hard)
    assert max_connections() == soft // 2


def test_metrics_show_the_memory_of_both_processes(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(fake_engine=True).wait_ready()
    metrics = daemon.get("/metrics")[1]
    assert "\npagedd:front_rss_bytes " in metrics
    assert "\npagedd:engine_rss_bytes " in metrics


async def test_a_task_of_the_daemon_that_breaks_ends_it_with_its_trace_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def breaks() -> None:
        raise ZeroDivisionError

    async def has_nothing_to_do() -> None:
        pass

    lives = asyncio.create_task(asyncio.sleep(3600))
    tasks = [asyncio.create_task(has_nothing_to_do()), lives, asyncio.create_task(breaks(), name="metering")]
    with pytest.raises(PageddError, match=r"^internal: metering broke"):
        await wait_for_fault(tasks)
    assert "ZeroDivisionError" in caplog.text
    lives.cancel()


def test_the_greeting_names_the_directory_only_where_clients_would_not_find_it(tmp_path: Path) -> None:
    usual, other = Endpoints(tmp_path), Endpoints(tmp_path / "elsewhere")
    usual.requests.touch()
    environ = {"RUNTIME_DIRECTORY": str(tmp_path), "HOME": str(tmp_path)}
    assert "PAGEDD_RUNTIME_DIR" not in how_to_talk(usual, environ)
    assert f"PAGEDD_RUNTIME_DIR={other.directory} " in how_to_talk(other, environ)
    assert f"curl --unix-socket {other.http} " in how_to_talk(other, environ)


def test_the_front_of_a_serving_daemon_maps_no_torch_and_its_engine_does(serving_daemon: RunningDaemon) -> None:
    maps = Path(f"/proc/{serving_daemon.process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "torch" in Path(f"/proc/{engine_of(serving_daemon).pid}/maps").read_text()


def test_a_hangup_reads_quotas_and_log_level_anew_and_a_wrong_file_changes_nothing(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "pagedd.toml"
    file.write_text("max_num_seqs = 4\n")
    daemon = start_daemon("--config", str(file), fake_engine=True).wait_ready()

    def reload(text: str, says: str) -> None:
        file.write_text(text)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_until(lambda daemon: says in daemon.log)

    assert completion(daemon, [5])[0] == 200
    reload("max_num_seqs = 8\n[quota]\nkv_share = 0.0001\n", "a restart is needed for: max_num_seqs")
    assert completion(daemon, [5])[0] == 400
    reload("max_num_seqs = 4\n[quota]\nkv_shore = 1\n", "did you mean quota.kv_share?")
    assert completion(daemon, [5])[0] == 400
    reload('max_num_seqs = 4\nlog_level = "debug"\n', "reloaded: log_level, quota")
    assert completion(daemon, [5])[0] == 200
    with Client(daemon.endpoints.directory) as client:
        told = [event.reason for event in client.stats().events if event.kind == "reload"]
    assert told == [
        "taken over: quota",
        "the settings are wrong and stay as they are; the log says why",
        "taken over: log_level, quota",
    ]
    assert "READY=1" in daemon.notified()
    assert daemon.stop() == 0
