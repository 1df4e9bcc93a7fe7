"""One daemon a directory, no stale sockets, exact modes."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedd.client.endpoints import Endpoints
from pagedd.client.errors import PageddError
from pagedd.daemon.runtime_dir import RuntimeLock, remove_stale_socket, socket_mode


@pytest.fixture
def endpoints(tmp_path: Path) -> Endpoints:
    return Endpoints(tmp_path / "run")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        yield server


def test_a_second_daemon_is_refused_with_the_pid_of_the_first(endpoints: Endpoints) -> None:
    first = RuntimeLock(endpoints)
    with pytest.raises(PageddError, match=rf"^already_running: another pagedd \(pid {os.getpid()}\) serves "):
        RuntimeLock(endpoints)
    first.release()
    RuntimeLock(endpoints).release()


def test_a_socket_that_nobody_answers_on_is_removed(endpoints: Endpoints, listener: socket.socket) -> None:
    endpoints.directory.mkdir()
    listener.bind(str(endpoints.http))
    listener.close()
    RuntimeLock(endpoints).release()
    assert not endpoints.http.exists()


def test_a_socket_that_is_alive_is_left_alone(endpoints: Endpoints, listener: socket.socket) -> None:
    endpoints.directory.mkdir()
    listener.bind(str(endpoints.http))
    listener.listen(1)
    with pytest.raises(PageddError, match=r"^already_running: something serves "):
        RuntimeLock(endpoints)
    assert endpoints.http.exists()


def test_a_file_in_a_sockets_place_is_not_touched(endpoints: Endpoints) -> None:
    endpoints.directory.mkdir()
    endpoints.http.write_text("precious")
    with pytest.raises(PageddError, match=r"^invalid_setting: .* is not a socket"):
        RuntimeLock(endpoints)
    assert endpoints.http.read_text() == "precious"


def test_a_refused_start_gives_the_lock_back(endpoints: Endpoints) -> None:
    endpoints.directory.mkdir()
    endpoints.http.write_text("in the way")
    with pytest.raises(PageddError):
        RuntimeLock(endpoints)
    endpoints.http.unlink()
    RuntimeLock(endpoints).release()


def test_a_directory_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PageddError, match=r"^invalid_setting: runtime directory"):
        RuntimeLock(Endpoints(tmp_path / "file" / "run"))


def test_the_sockets_are_gone_after_release(endpoints: Endpoints, listener: socket.socket) -> None:
    lock = RuntimeLock(endpoints)
    listener.bind(str(endpoints.requests))
    lock.release()
    assert not endpoints.requests.exists()


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, listener: socket.socket, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with socket_mode(mode):
            listener.bind(str(tmp_path / "s"))
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode


def test_a_path_that_does_not_exist_is_not_stale(tmp_path: Path) -> None:
    remove_stale_socket(tmp_path / "nothing")
