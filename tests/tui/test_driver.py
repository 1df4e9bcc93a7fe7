"""The real program in a terminal of its own: it sleeps until somebody types or a frame comes."""

import os
import select
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from pagedd.bench.frames import FakeEngine
from pagedd.bench.terminal import start_in_terminal
from pagedd.client.endpoints import Endpoints, ipc
from pagedd.client.protocol import encode

WAIT_S = 60.0
# The daemon's next frame is so far away that nothing has to be said of this one's age.
FAR_S = 600.0


class Program:
    """Pagetop beside a daemon that said one thing."""

    def __init__(self, directory: str) -> None:
        self._context = zmq.Context()
        publisher = self._context.socket(zmq.XPUB)
        publisher.bind(ipc(Endpoints(Path(directory)).stats))
        command = [sys.executable, "-P", "-m", "pagedd.tui.app", "--runtime-dir", directory]
        self.process, self._terminal = start_in_terminal(command, rows=30, columns=120)
        assert publisher.poll(int(WAIT_S * 1000)), "it subscribes"
        frame = FakeEngine().frame()
        frame.interval_s = FAR_S
        publisher.send(encode(frame))
        self.expect("fragmentation")

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def expect(self, word: str) -> None:
        """Reads until that is written."""
        seen, limit_s = b"", time.monotonic() + WAIT_S
        while word.encode() not in seen:
            assert time.monotonic() < limit_s, seen[-2000:]
            if select.select([self._terminal], [], [], 0.05)[0]:
                seen += os.read(self._terminal, 1 << 16)

    def status(self) -> int:
        """What it ends with; it cannot as long as nobody reads what it writes."""
        with suppress(OSError):
            while os.read(self._terminal, 1 << 16):
                pass
        return self.process.wait(WAIT_S)

    def turns(self) -> int:
        """How often any of its threads has had a processor."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[2]) for task in tasks)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)
        self._context.destroy(linger=0)


@pytest.fixture
def program() -> Iterator[Program]:
    # Not pytest's own: a Unix socket's path is at most 107 bytes long.
    with tempfile.TemporaryDirectory(prefix="pagetop-") as directory:
        started = Program(directory)
        yield started
        started.close()


def test_while_nobody_types_and_no_frame_is_due_it_sleeps(program: Program) -> None:
    # What a first picture starts is over some time; one that polls never stops.
    limit_s, turns = time.monotonic() + WAIT_S, -1
    while turns != program.turns():
        assert time.monotonic() < limit_s, "it wakes again and again"
        turns = program.turns()
        time.sleep(1.0)


def test_an_escape_alone_is_a_key_and_bytes_that_are_no_text_end_nothing(program: Program) -> None:
    program.type(b"?")
    program.expect("Keys")
    program.type(b"\x1b")
    program.expect("fragmentation")
    program.type(b"\xff\xfe\x1b[")
    program.type(b"B5")
    program.expect("Events")
    program.type(b"q")
    assert program.status() == 0
