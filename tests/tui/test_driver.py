"""The real program in a terminal of its own: it sleeps until there is something to do, and leaves all as it was."""

import fcntl
import os
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from pagedd.bench.frames import FakeEngine
from pagedd.bench.terminal import start_in_terminal
from pagedd.client.endpoints import Endpoints, ipc
from pagedd.client.protocol import encode

WAIT_S = 60.0
# The daemon's next frame is so far away that nothing has to be said of this one's age.
FAR_S = 59.0


# What a terminal begins with; all else that is set at the end was left behind.
PLAIN_MODES = {b"7": b"h", b"25": b"h"}


class Program:
    """Pagetop beside a daemon that said one thing; its standard error is a file. A shell does `before` it."""

    def __init__(self, directory: str, before: str = "") -> None:
        self.errors = Path(directory, "errors")
        self._seen = b""
        self._context = zmq.Context()
        publisher = self._context.socket(zmq.XPUB)
        publisher.bind(ipc(Endpoints(Path(directory)).stats))
        # It answers no question. Without it, pagetop would look for some seconds whether it is there.
        self._context.socket(zmq.ROUTER).bind(ipc(Endpoints(Path(directory)).requests))
        command = [sys.executable, "-P", "-m", "pagedd.tui.app", "--runtime-dir", directory]
        shell = ["sh", "-c", f'{before} exec "$@" 2>{self.errors}', "sh"]
        self.process, self._terminal = start_in_terminal([*shell, *command], rows=30, columns=120)
        self._attributes = termios.tcgetattr(self._terminal)
        assert publisher.poll(int(WAIT_S * 1000)), "it subscribes"
        frame = FakeEngine().frame()
        frame.interval_s = FAR_S
        publisher.send(encode(frame))
        self.expect(b"fragmentation")

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def expect(self, word: bytes, after: bytes = b"") -> None:
        """Reads until `word` is written, `after` that."""
        start = len(self._seen)
        self._read_until(lambda: word in self._seen[start:] and after in self._seen[start : self._seen.rindex(word)])

    def go_on(self) -> None:
        """Returns when it has taken the terminal anew and drawn: what is typed before that is lost."""
        self.process.send_signal(signal.SIGCONT)
        self.expect(b"fragmentation", after=b"\x1b[?1049h")

    def status(self) -> int:
        """What it ends with; it cannot as long as nobody reads what it writes."""
        self._read_until(lambda: self.process.poll() is not None)
        return self.process.wait()

    def stop(self, number: int) -> None:
        """Returns when it stands still."""
        self.process.send_signal(number)
        self.await_stop()

    def await_stop(self) -> None:
        stat = Path(f"/proc/{self.process.pid}/stat")
        self._read_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def fill(self) -> None:
        """Returns when the terminal takes no more of what it draws."""
        limit_s, before, unread = time.monotonic() + WAIT_S, -1, 0
        while unread != before:
            assert time.monotonic() < limit_s, "it takes more and more"
            self.type(b"t")
            time.sleep(1.0)
            before, unread = unread, struct.unpack("i", fcntl.ioctl(self._terminal, termios.FIONREAD, bytes(4)))[0]

    def hang_up(self) -> None:
        """The other end of the terminal goes."""
        os.close(self._terminal)
        self._terminal = os.open(os.devnull, os.O_RDWR)

    def is_plain(self) -> bool:
        """Whether the terminal is as it was before."""
        modes = dict(re.findall(rb"\x1b\[\?(\d+)([hl])", self._seen))
        left = {mode: to for mode, to in modes.items() if to != PLAIN_MODES.get(mode, b"l")}
        has_keys = self._seen.count(b"\x1b[>") > self._seen.count(b"\x1b[<u")
        return not left and not has_keys and termios.tcgetattr(self._terminal) == self._attributes

    def _read_until(self, condition: Callable[[], bool]) -> None:
        limit_s, is_open = time.monotonic() + WAIT_S, True
        while not (is_met := condition()) or is_open:
            assert time.monotonic() < limit_s, self._seen[-2000:]
            is_open = bool(select.select([self._terminal], [], [], 0.0 if is_met else 0.05)[0])
            if is_open:
                try:
                    self._seen += os.read(self._terminal, 1 << 16)
                except OSError:  # all others have closed it
                    is_open = False
                    time.sleep(0.05)

    def turns(self) -> int:
        """How often any of its threads has had a processor."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[2]) for task in tasks)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)
        self._context.destroy(linger=0)


@pytest.fixture(autouse=True)
def signals_mean_what_they_do_at_a_terminal() -> Iterator[None]:
    """Whoever runs the tests in the background may ignore some, and what is ignored would be so in pagetop."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    # Not pytest's own: a Unix socket's path is at most 107 bytes long.
    with tempfile.TemporaryDirectory(prefix="pagetop-") as directory:
        programs: list[Program] = []

        def starting(before: str = "") -> Program:
            programs.append(Program(directory, before))
            return programs[-1]

        yield starting
        for program in programs:
            program.close()


@pytest.fixture
def program(start: Callable[..., Program]) -> Program:
    return start()


def test_while_nobody_types_and_no_frame_is_due_it_sleeps(program: Program) -> None:
    # What a first picture starts is over some time; one that polls never stops.
    limit_s, turns = time.monotonic() + WAIT_S, -1
    while turns != program.turns():
        assert time.monotonic() < limit_s, "it wakes again and again"
        turns = program.turns()
        time.sleep(1.0)


def test_an_escape_alone_is_a_key_and_bytes_that_are_no_text_end_nothing(program: Program) -> None:
    program.type(b"?")
    program.expect(b"Keys")
    program.type(b"\x1b")
    program.expect(b"fragmentation")
    program.type(b"\xff\xfe\x1b[")
    program.type(b"B5")
    program.expect(b"Events")
    program.type(b"q")
    assert program.status() == 0


def test_it_draws_on_standard_output(program: Program) -> None:
    program.type(b"q")
    assert program.status() == 0
    assert program.is_plain()
    assert program.errors.read_text() == ""


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP), (signal.SIGQUIT, -signal.SIGQUIT)],
)
def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(program: Program, number: int, status: int) -> None:
    program.process.send_signal(number)
    assert program.status() == status
    assert program.is_plain()


def test_whatever_stopped_it_it_goes_on_and_leaves_the_terminal_as_it_was(program: Program) -> None:
    program.stop(signal.SIGSTOP)
    program.go_on()
    for _ in range(2):
        program.type(b"\x1a")
        program.await_stop()
        assert program.is_plain(), "a shell has it now"
        program.go_on()
    program.type(b"q")
    assert program.status() == 0
    assert program.is_plain()


def test_a_terminal_that_goes_ends_it_also_where_hangups_are_ignored(start: Callable[..., Program]) -> None:
    program = start(before="trap '' HUP;")
    program.hang_up()
    assert program.process.wait(WAIT_S) == 128 + signal.SIGHUP


def test_a_terminal_that_nobody_reads_does_not_keep_it(program: Program) -> None:
    program.fill()
    program.process.send_signal(signal.SIGTERM)
    # It is ended as it waits; or it left, if it had nothing more to write.
    assert program.process.wait(WAIT_S) in (-signal.SIGTERM, 128 + signal.SIGTERM)
