"""The log of requests: written by a daemon, read by replay."""

import logging
import os
from pathlib import Path

import msgspec
import pytest

from pagedd.client.aio import AsyncClient
from pagedd.client.replay import replay
from pagedd.client.request_log import LoggedRequest, arrivals_s, read_log
from pagedd.daemon.request_log import RequestLog, why_unwritable

from .scripted_host import ScriptedHost
from .served import serving

ONE = LoggedRequest(prompt_tokens=3, output_tokens=2, time_s=5.0)


def test_the_file_is_its_owners_alone_and_a_full_one_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "log" / "requests.jsonl"
    log = RequestLog(path, max_bytes=150)
    for number in range(5):
        log.add(LoggedRequest(prompt_tokens=3, output_tokens=1 + number))
    log.close()
    assert path.stat().st_mode & 0o777 == 0o600
    kept = [
        entry.output_tokens
        for name in ("requests.jsonl.1", "requests.jsonl")
        for entry in read_log(path.parent / name, "file")
    ]
    assert kept == [1, 2, 3, 4, 5]
    log.add(ONE)
    assert read_log(path, "file")[-1] == ONE, "a file that is there is continued"


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
def test_a_clock_that_is_set_between_two_requests_changes_nothing_of_their_pace(jump_s: float) -> None:
    """Logged as they ended: the second came before the first, and the last without a gap, by hand."""
    entries = [
        LoggedRequest(prompt_tokens=1, output_tokens=1, time_s=1000.0),
        LoggedRequest(prompt_tokens=1, output_tokens=1, time_s=998.0 + jump_s, after_s=-2.0),
        LoggedRequest(prompt_tokens=1, output_tokens=1, time_s=1003.0 + jump_s, after_s=5.0),
        LoggedRequest(prompt_tokens=1, output_tokens=1, time_s=1004.5 + jump_s),
    ]
    assert arrivals_s(entries) == [2.0, 0.0, 5.0, 6.5]


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RequestLog(None).add(ONE)
    assert list(tmp_path.iterdir()) == []


def test_where_requests_go_is_said_at_the_start_or_why_they_cannot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").touch()
    for path in (tmp_path / "new" / "log", tmp_path / "file" / "log"):
        log = RequestLog(path)
        log.announce()
        log.add(ONE)
        log.close()
    assert caplog.messages == [
        f"requests are logged in {tmp_path / 'new' / 'log'}",
        f"{tmp_path / 'file' / 'log'} takes no requests until it can be written again: File exists",
    ]


def test_a_look_at_where_the_log_could_go_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert why_unwritable(tmp_path / "new" / "folder" / "log") is None
    assert why_unwritable(tmp_path / "file") is None
    assert why_unwritable(tmp_path) == "it is no regular file"
    assert why_unwritable(tmp_path / "file" / "log") == f"{tmp_path / 'file'} is no folder"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_costs_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path, write = tmp_path / "log", os.write
    log = RequestLog(path)
    log.add(ONE)
    monkeypatch.setattr("pagedd.daemon.request_log.os.write", lambda fd, line: write(fd, line[:5]))
    log.add(ONE)
    log.add(ONE)
    monkeypatch.undo()
    log.add(ONE)
    assert read_log(path, "file") == [ONE, ONE]
    assert len(caplog.records) == 1


def test_a_pipe_or_a_folder_in_the_files_place_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        RequestLog(tmp_path / name).add(ONE)


def test_a_file_that_was_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    path.chmod(0o664)
    RequestLog(path).add(ONE)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_device_in_the_files_place_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    before = os.stat("/dev/null").st_mode
    RequestLog(Path("/dev/null")).add(ONE)
    assert os.stat("/dev/null").st_mode == before
    assert "it is no regular file" in caplog.text


def test_two_daemons_do_not_write_to_one_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    first, second = RequestLog(path), RequestLog(path)
    first.add(ONE)
    second.add(ONE)
    assert "another daemon writes to it" in caplog.text
    first.close()
    second.add(ONE)
    assert read_log(path, "file") == [ONE, ONE]


async def test_after_a_rotation_and_a_reload_the_log_goes_on_in_the_file_of_its_name(socket_folder: Path) -> None:
    path = socket_folder / "log"
    async with serving(socket_folder, request_log=path) as served, AsyncClient(served.endpoints.directory) as client:
        await client.generate("a", max_tokens=1)
        path.rename(path.with_suffix(".old"))
        served.service.reopen_logs()
        await client.generate("a", max_tokens=2)
        await client.generate("a", max_tokens=3)
    assert [entry.output_tokens for entry in read_log(path, "file")] == [2, 3]
    assert [entry.output_tokens for entry in read_log(path.with_suffix(".old"), "file")] == [1]


@pytest.mark.parametrize("with_prompts", [False, True])
async def test_what_was_asked_is_written_down_and_can_be_asked_again(socket_folder: Path, with_prompts: bool) -> None:
    path = socket_folder / "log"
    host = ScriptedHost(reply=lambda request: [65] * request.params.max_tokens)
    settings = {"request_log": path, "request_log_prompts": with_prompts}
    async with (
        serving(socket_folder, host=host, **settings) as served,
        AsyncClient(served.endpoints.directory) as client,
    ):
        await client.generate("abc", max_tokens=2, priority=7)
        await client.generate("x", max_tokens=4)
        text = path.read_text()
        assert "abc" not in text
        first, second = read_log(path, "file")
        assert first.prompt_token_ids == ([97, 98, 99] if with_prompts else None)
        assert (first.prompt_tokens, first.output_tokens, first.priority, second.output_tokens) == (3, 2, 7, 4)
        assert 0 <= second.time_s - first.time_s < 60
        host.submitted.clear()
        later = msgspec.structs.replace(second, time_s=first.time_s + 30)
        replayed = await replay(client, [later, first], speed=100)
    assert [(len(request.prompt_token_ids), request.priority) for request in host.submitted] == [(3, 7), (1, 0)]
    if with_prompts:
        assert host.submitted[0].prompt_token_ids == [97, 98, 99]
    assert (replayed.num_prompt_tokens, replayed.num_output_tokens, len(replayed.first_token_s)) == (4, 6, 2)
    assert not replayed.failures


async def test_a_request_that_fails_in_a_replay_is_counted_and_the_others_go_on(socket_folder: Path) -> None:
    async with serving(socket_folder) as served, AsyncClient(served.endpoints.directory) as client:
        too_long = LoggedRequest(prompt_tokens=10**15, system_tokens=10**15, output_tokens=1)
        replayed = await replay(client, [too_long, ONE], speed=1000)
    assert dict(replayed.failures) == {"prompt_too_long": 1}
    assert len(replayed.first_token_s) == 1
    assert replayed.lines()[-1] == "1 ended with prompt_too_long"
