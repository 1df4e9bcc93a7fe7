"""Where daemon and client look for the sockets."""

import os
import socket
from pathlib import Path

import pytest

from pagedd.client.endpoints import Endpoints, client_endpoints, create_directory, ipc, server_endpoints
from pagedd.client.errors import PageddError


def listen(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "pagedd.sock"))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PAGEDD_RUNTIME_DIR": "/a", "RUNTIME_DIRECTORY": "/b", "XDG_RUNTIME_DIR": "/c"}, "/a"),
        ({"RUNTIME_DIRECTORY": "/b:/other", "XDG_RUNTIME_DIR": "/c"}, "/b"),
        ({"XDG_RUNTIME_DIR": "/c", "HOME": "/home/ana"}, "/c/pagedd"),
        ({"XDG_RUNTIME_DIR": "relative", "HOME": "/home/ana"}, "/home/ana/.cache/pagedd/run"),
        ({"HOME": "/home/ana"}, "/home/ana/.cache/pagedd/run"),
    ],
)
def test_a_daemon_binds_in_the_first_directory_that_is_named(environ: dict[str, str], expected: str) -> None:
    assert server_endpoints(environ=environ).directory == Path(expected)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that the table of users does not know, as in a container."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME")


@pytest.mark.usefixtures("homeless")
def test_without_a_home_a_daemon_says_what_to_set_and_a_client_looks_elsewhere(directory: Path) -> None:
    with pytest.raises(PageddError, match="has no home directory; set HOME, or XDG_RUNTIME_DIR") as refused:
        server_endpoints(environ={})
    assert refused.value.code == "invalid_setting"
    assert server_endpoints(environ={"XDG_RUNTIME_DIR": "/c"}).directory == Path("/c/pagedd")
    assert client_endpoints(environ={}, system_directory=directory).directory == directory
    assert client_endpoints(environ={"XDG_RUNTIME_DIR": "/c"}, system_directory=directory).directory == Path(
        "/c/pagedd"
    )


def test_a_directory_given_by_hand_comes_before_the_environment() -> None:
    environ = {"PAGEDD_RUNTIME_DIR": "/a"}
    assert server_endpoints("/given", environ).requests == Path("/given/pagedd.sock")
    assert client_endpoints("/given", environ).requests == Path("/given/pagedd.sock")


def test_a_relative_directory_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert server_endpoints("run").stats == tmp_path / "run" / "stats.sock"


def test_a_client_prefers_the_place_where_a_socket_is(directory: Path) -> None:
    system, session, home = directory / "system", directory / "session", directory / "home"
    environ = {"XDG_RUNTIME_DIR": str(session), "HOME": str(home)}

    def found() -> Path:
        return client_endpoints(environ=environ, system_directory=system).directory

    assert found() == session / "pagedd"  # nobody anywhere: where this user's own daemon would be
    listen(home / ".cache" / "pagedd" / "run")
    assert found() == home / ".cache" / "pagedd" / "run"
    listen(session / "pagedd")
    assert found() == session / "pagedd"
    listen(system)
    assert found() == system


def test_a_client_started_by_another_unit_is_not_led_into_that_units_directory(directory: Path) -> None:
    listen(directory / "system")
    environ = {"RUNTIME_DIRECTORY": str(directory / "some-other-service"), "HOME": "/nowhere"}
    assert client_endpoints(environ=environ, system_directory=directory / "system").directory == directory / "system"


def test_a_place_that_may_not_be_entered_counts_only_when_no_other_has_a_socket(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = directory / "system"
    environ = {"XDG_RUNTIME_DIR": str(directory / "session")}
    really_stat = os.stat

    def stat(path: Path) -> os.stat_result:
        if Path(path).parent == closed:
            raise PermissionError
        return really_stat(path)

    monkeypatch.setattr("pagedd.client.endpoints.os.stat", stat)
    assert client_endpoints(environ=environ, system_directory=closed).directory == closed
    listen(directory / "session" / "pagedd")
    assert client_endpoints(environ=environ, system_directory=closed).directory == directory / "session" / "pagedd"


def test_a_socket_path_may_have_107_bytes_and_no_more() -> None:
    name_bytes = len("/pagedd.sock")
    longest = "/" + "x" * (107 - name_bytes - 1)
    assert len(str(server_endpoints(longest).requests)) == 107
    with pytest.raises(PageddError, match=r"invalid_setting: .*108 bytes, limit 107; set PAGEDD_RUNTIME_DIR"):
        server_endpoints(longest + "x")
    # Bytes are counted, not characters.
    with pytest.raises(PageddError, match="limit 107"):
        client_endpoints("/" + "ä" * 60)


def test_a_made_directory_is_its_owners_alone(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path / "a" / "b")
    create_directory(endpoints)
    assert endpoints.directory.stat().st_mode & 0o777 == 0o700
    create_directory(endpoints)  # a second start finds its own


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o720])
def test_a_directory_out_of_which_others_may_take_a_socket_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PageddError, match=f"mode {mode:04o}; it must belong to user"):
        create_directory(Endpoints(tmp_path))
    tmp_path.chmod(0o1770)  # the group may put files into it, and take only its own out
    create_directory(Endpoints(tmp_path))


def test_a_directory_wider_than_its_owner_is_left_as_it_is(tmp_path: Path) -> None:
    """systemd makes /run/pagedd 0750 so that the group may connect."""
    tmp_path.chmod(0o750)
    create_directory(Endpoints(tmp_path))
    assert tmp_path.stat().st_mode & 0o777 == 0o750


def test_zeromq_addresses_are_the_paths() -> None:
    assert ipc(Endpoints(Path("/run/pagedd")).admin) == "ipc:///run/pagedd/admin.sock"
