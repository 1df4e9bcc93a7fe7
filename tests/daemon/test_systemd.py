"""What the service manager hears."""

import os
import socket
from pathlib import Path

import pytest

from pagedd.daemon.systemd import notify, watchdog_interval_s


def listen(address: str) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    channel.bind(address)
    channel.settimeout(5)
    return channel


def test_assignments_arrive_as_one_datagram(tmp_path: Path) -> None:
    with listen(str(tmp_path / "notify")) as manager:
        assert notify("READY=1", "STATUS=up", environ={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert manager.recv(4096) == b"READY=1\nSTATUS=up"


def test_an_abstract_socket_is_written_with_an_at_sign(tmp_path: Path) -> None:
    name = f"pagedd-test-{tmp_path.name}-{id(tmp_path)}"
    with listen("\0" + name) as manager:
        assert notify("STOPPING=1", environ={"NOTIFY_SOCKET": "@" + name})
        assert manager.recv(4096) == b"STOPPING=1"


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}])
def test_without_a_manager_nothing_happens(environ: dict[str, str]) -> None:
    assert not notify("READY=1", environ=environ)


def test_a_manager_that_is_gone_does_not_stop_the_daemon(tmp_path: Path) -> None:
    assert not notify("READY=1", environ={"NOTIFY_SOCKET": str(tmp_path / "nobody")})


def test_the_watchdog_is_fed_thrice_in_its_time() -> None:
    assert watchdog_interval_s({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}) == 10


@pytest.mark.parametrize(
    "environ", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}]
)
def test_no_watchdog_is_fed_that_waits_for_nobody_or_for_another(environ: dict[str, str]) -> None:
    assert watchdog_interval_s(environ) is None
