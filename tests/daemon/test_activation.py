"""A daemon whose sockets systemd holds."""

import os
import socket
from pathlib import Path

import pytest

from pagedd.client.endpoints import Endpoints
from pagedd.client.errors import PageddError
from pagedd.client.protocol import Done, Generate
from pagedd.daemon import activation
from pagedd.daemon.runtime_dir import RuntimeLock

from .served import serving


def listen(path: Path) -> socket.socket:
    path.parent.mkdir(exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen()
    return listener


async def test_a_daemon_serves_on_the_sockets_it_was_given_and_leaves_them_to_their_owner(socket_folder: Path) -> None:
    endpoints = Endpoints(socket_folder / "run")
    paths = (endpoints.requests, endpoints.stats, endpoints.http)
    listeners = {path: listen(path) for path in paths}
    # What is connected and sent before anybody serves is not lost.
    early = socket.socket(socket.AF_UNIX)
    early.connect(str(endpoints.http))
    early.sendall(b"GET /health HTTP/1.0\r\n\r\n")
    inherited = {path: os.dup(listener.fileno()) for path, listener in listeners.items()}
    async with serving(socket_folder, inherited=inherited) as served:
        assert (await served.http.get("http://localhost/ready")).status == 200
        async with served.client() as client:
            await client.say(Generate(id="a", prompt="ab"))
            assert isinstance(await client.hear_end(), Done)
        assert endpoints.requests.stat().st_mode & 0o777 == 0o600
        assert endpoints.admin.stat().st_mode & 0o777 == 0o600
    assert b"200 OK" in early.recv(4096)
    early.close()
    for path, listener in listeners.items():
        assert path.exists()
        with socket.socket(socket.AF_UNIX) as next_client:
            next_client.connect(str(path))
        listener.close()


def test_the_lock_leaves_sockets_that_another_holds_alone(socket_folder: Path) -> None:
    endpoints = Endpoints(socket_folder / "run")
    endpoints.directory.mkdir(mode=0o700)
    with listen(endpoints.http):
        lock = RuntimeLock(endpoints, [endpoints.http])
        lock.release()
        assert endpoints.http.exists()


def test_only_the_process_that_was_started_with_sockets_has_them() -> None:
    assert activation.inherited_sockets({}) == {}
    assert activation.inherited_sockets({"LISTEN_PID": "1", "LISTEN_FDS": "2"}) == {}


def test_listening_unix_sockets_are_found_by_their_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listen(tmp_path / "a.sock") as listener, socket.create_server(("127.0.0.1", 0)) as other:
        first = 100
        os.dup2(listener.fileno(), first)
        os.dup2(other.fileno(), first + 1)
        monkeypatch.setattr(activation, "_FIRST_FD", first)
        try:
            environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"}
            assert activation.inherited_sockets(environ) == {tmp_path / "a.sock": first}
            assert not os.get_inheritable(first)
        finally:
            os.close(first)
            os.close(first + 1)


@pytest.mark.parametrize("count", ["abc", "-1", "٣", "9" * 30])
def test_a_number_of_sockets_that_is_none_is_refused_with_its_name(count: str) -> None:
    with pytest.raises(PageddError, match="LISTEN_FDS") as refused:
        activation.inherited_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count})
    assert refused.value.code == "invalid_setting"


def test_descriptors_that_are_no_sockets_with_a_path_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0pagedd-test-{os.getpid()}")
    abstract.listen()
    named = listen(tmp_path / "a" / "s")
    given = [os.open(tmp_path, os.O_RDONLY), os.dup(abstract.fileno()), os.dup(named.fileno())]
    first = 200
    for i, fd in enumerate(given):
        os.dup2(fd, first + i)
        os.close(fd)
    monkeypatch.setattr(activation, "_FIRST_FD", first)
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "4"}  # one more than there are
    assert activation.inherited_sockets(environ) == {tmp_path / "a" / "s": first + 2}
    assert caplog.text.count("which came with the start") == 3
    for i in range(3):
        os.close(first + i)
