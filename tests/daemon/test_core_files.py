"""No process of a daemon leaves a core file, whoever starts it."""

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .conftest import StartDaemon


@pytest.fixture
def cores_are_kept() -> Iterator[None]:
    """As in the shell of who looks for a fault."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


@pytest.mark.usefixtures("cores_are_kept")
def test_no_process_of_a_daemon_leaves_a_core_file(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(fake_engine=True).wait_ready()
    front = psutil.Process(daemon.process.pid)
    limits = {Path(f"/proc/{process.pid}/limits").read_text() for process in (front, *front.children(recursive=True))}
    cores = {line.split()[-3:-1] == ["1", "1"] for text in limits for line in text.splitlines() if "core" in line}
    assert cores == {True}
    assert daemon.stop() == 0
