"""The real pagetop in a real terminal against a real daemon: tmux types and reads the screen."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pagedd.client import Client, PageddError

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

WAIT_S = 60.0
# Long enough that it is still there when a test looks, on any machine.
LONG = {"max_tokens": 8000, "ignore_eos": True}


class Terminal:
    """A tmux server of its own with one window, in which a shell runs `command`."""

    def __init__(self, folder: Path, command: str, environ: dict[str, str], *, term: str = "tmux-256color") -> None:
        self._socket = folder / "tmux"
        settings = folder / "tmux.conf"
        settings.write_text(f'set -g default-terminal "{term}"\nset -s escape-time 0\n')
        assignments = " ".join(f"{name}={value}" for name, value in environ.items())
        self._tmux("-f", str(settings), "new-session", "-d", "-x", "120", "-y", "38", "sh")
        self.type(f"PS1='$ '; clear; env -u COLUMNS -u LINES {assignments} {command}; echo status=$?", "Enter")

    def type(self, *keys: str) -> None:
        """Keys by tmux's names; a text is typed as it is."""
        self._tmux("send-keys", "-t", ":0", *keys)

    def resize(self, columns: int, lines: int) -> None:
        self._tmux("resize-window", "-t", ":0", "-x", str(columns), "-y", str(lines))

    def text(self) -> str:
        return self._tmux("capture-pane", "-p", "-t", ":0")

    def colours(self) -> str:
        """The screen with its escape sequences."""
        return self._tmux("capture-pane", "-p", "-e", "-t", ":0")

    def mode(self, name: str) -> str:
        return self._tmux("display-message", "-p", "-t", ":0", f"#{{{name}}}").strip()

    def expect(self, *words: str) -> str:
        """Waits until all of these are on screen at once."""
        return self.until(lambda text: all(word in text for word in words), f"{words}")

    def until(self, condition: Callable[[str], bool], what: str) -> str:
        limit_s = time.monotonic() + WAIT_S
        while not condition(text := self.text()):
            assert time.monotonic() < limit_s, f"no {what} on screen:\n{text}"
            time.sleep(0.05)
        return text

    def close(self) -> None:
        with suppress(subprocess.CalledProcessError):
            self._tmux("kill-server")

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-S", str(self._socket), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


class Daemon:
    """A real daemon with the real model, in a runtime directory of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.directory = folder / "run"
        self._folder = folder
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        flags = ["--model", str(self._model), "--max-model-len", "8192", "--num-blocks", "1024", "--max-num-seqs", "4"]
        # Slow on purpose: a request has to be there for as long as a test looks at it.
        flags += ["--num-threads", "1", "--num-speculative-tokens", "0"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pagedd.daemon.cli", "--runtime-dir", str(self.directory), *flags],
                stdout=log,
                stderr=log,
            )
        limit_s = time.monotonic() + WAIT_S
        while not self._is_ready():
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < limit_s, (self._folder / "log").read_text()
            time.sleep(0.1)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None

    def _is_ready(self) -> bool:
        with suppress(PageddError), Client(self.directory, timeout_s=2) as client:
            return client.ping().state == "ready"
        return False


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Not pytest's own: a Unix socket's path is at most 107 bytes long.
    with tempfile.TemporaryDirectory(prefix="pagetop-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def daemon(folder: Path, model_gguf: Path) -> Iterator[Daemon]:
    started = Daemon(folder, model_gguf)
    started.start()
    yield started
    started.stop()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.directory) as connected:
        yield connected


@pytest.fixture
def start(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []
    folders: list[Path] = []

    def starting(flags: str = "", *, environ: dict[str, str] | None = None, term: str = "tmux-256color") -> Terminal:
        place = Path(tempfile.mkdtemp(prefix="pagetop-tmux-"))
        folders.append(place)
        command = f"{sys.executable} -P -m pagedd.tui.app --runtime-dir {daemon.directory} {flags}"
        terminals.append(Terminal(place, command, environ or {}, term=term))
        return terminals[-1]

    yield starting
    for terminal in terminals:
        terminal.close()
    for place in folders:
        shutil.rmtree(place, ignore_errors=True)


def live(client: Client) -> list[str]:
    return [row.request_id for row in client.stats().requests]


def colours_of(terminal: Terminal) -> set[str]:
    return set(re.findall(r"38;[25];[\d;]*m", terminal.colours()))


def long_request(client: Client, text: str) -> str:
    """Starts a request that goes on, and returns its request_id."""
    generation = client.generate(text, **LONG)  # type: ignore[arg-type]
    deltas = iter(generation)
    next(deltas)
    assert generation.request_id is not None
    KEPT.append(deltas)
    return generation.request_id


# A generation that nobody reads any more would be cancelled.
KEPT: list[object] = []


@pytest.mark.parametrize("term", ["tmux-256color", "screen"])
def test_a_request_is_watched_opened_given_a_priority_and_cancelled(
    start: Callable[..., Terminal], client: Client, term: str
) -> None:
    request_id = long_request(client, "Once upon a time")
    terminal = start(term=term)
    terminal.expect("KV cache", "Requests (1 running", request_id[:8], "decode", "live")
    # 16 colours: the terminal's own, by their short codes.
    has_many = "[38;2;" in terminal.colours() or "[38;5;" in terminal.colours()
    assert has_many == (term == "tmux-256color")

    terminal.type("Enter")
    terminal.expect("Block table, ", "0 → 0", "Timeline", "Once upon a time")
    terminal.type("Escape")
    terminal.expect("KV cache")

    terminal.type("+")
    terminal.expect("Priority of this request", "Once upon a time", request_id, "0 → 10")
    terminal.type("+", "y")
    terminal.expect("has priority 20")
    assert [row.priority for row in client.stats().requests] == [20]

    terminal.type("k")
    terminal.expect("Cancel this request", "Once upon a time", "tokens of at most 8000 so far", request_id)
    terminal.type("y")
    terminal.expect("Requests (0 running")
    assert live(client) == []
    terminal.type("q")
    terminal.expect("status=0")


def test_every_screen_is_a_key_away_and_folds_with_the_window(start: Callable[..., Terminal], client: Client) -> None:
    request_id = long_request(client, "The sea was calm")
    terminal = start()
    terminal.expect("KV cache", "live", request_id[:8])
    for key, words in (
        ("2", "Holders"),
        ("3", "Requests ("),
        ("4", "Cached prefixes"),
        ("5", "Events"),
        ("?", "Numbers"),
    ):
        terminal.type(key)
        terminal.expect(words)
    terminal.type("1")
    terminal.expect("Throughput")
    for columns, lines in ((80, 24), (40, 12), (200, 60), (100, 30)):
        terminal.resize(columns, lines)
        terminal.expect("pagetop", request_id[:8])
    terminal.resize(20, 5)
    terminal.expect("too small")
    terminal.resize(120, 38)
    terminal.expect("KV cache", request_id[:8])
    client.cancel(request_id)


def test_a_killed_pagetop_leaves_the_terminal_as_it_was(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.expect("KV cache", "live")
    assert terminal.mode("alternate_on") == "1"
    pids = subprocess.run(
        ["pgrep", "-P", terminal.mode("pane_pid")], check=True, capture_output=True, text=True
    ).stdout.split()
    os.kill(int(pids[0]), signal.SIGTERM)
    terminal.expect("status=")
    assert terminal.mode("alternate_on") == "0"
    assert terminal.mode("mouse_any_flag") == "0"
    terminal.type("echo it echoes", "Enter")
    terminal.until(lambda text: text.count("it echoes") == 2, "echo of what is typed")


@pytest.mark.parametrize("is_drawn", [False, True], ids=["while it starts", "when it is drawn"])
def test_a_terminal_that_is_closed_takes_its_pagetop_with_it(start: Callable[..., Terminal], is_drawn: bool) -> None:
    terminals = [start() for _ in range(3)]
    if is_drawn:
        for terminal in terminals:
            terminal.expect("KV cache", "live")
    children = (["pgrep", "-P", terminal.mode("pane_pid")] for terminal in terminals)
    found = [subprocess.run(command, check=False, capture_output=True, text=True) for command in children]
    pids = [int(pid) for pgrep in found for pid in pgrep.stdout.split()]
    for terminal in terminals:
        terminal.close()
    limit_s = time.monotonic() + WAIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < limit_s, "still there"
        time.sleep(0.05)


def test_the_daemon_is_killed_and_started_again(start: Callable[..., Terminal], daemon: Daemon, client: Client) -> None:
    request_id = long_request(client, "A lighthouse keeper")
    terminal = start()
    terminal.expect(request_id[:8], "live")
    daemon.stop(signal.SIGKILL)
    terminal.expect("disconnected, retrying", request_id[:8], "old", "retrying: ")
    # Greys, and the red that says why.
    terminal.until(lambda _: len(colours_of(terminal)) <= 4, "picture without colours")
    daemon.start()
    terminal.expect("live", "Requests (0 running")
    terminal.until(lambda _: len(colours_of(terminal)) > 5, "picture with colours")
    terminal.type("5")
    terminal.expect("connection lost", "engine")


@pytest.mark.parametrize(
    "environ",
    [
        {"NO_COLOR": "1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        {"COLORFGBG": "'0;15'"},
    ],
    ids=["no color", "no utf-8", "light"],
)
def test_other_terminals_are_drawn_on_without_a_fault(start: Callable[..., Terminal], environ: dict[str, str]) -> None:
    terminal = start(environ=environ)
    text = terminal.expect("KV cache", "live")
    if "NO_COLOR" in environ:
        assert "[38;" not in terminal.colours()
        assert "[3" not in terminal.colours().replace("[39m", "")
    if "LC_ALL" in environ:
        assert text.isascii()
    terminal.type("q")
    terminal.expect("status=0")


def test_a_terminal_that_cannot_be_drawn_on_gets_text(start: Callable[..., Terminal]) -> None:
    terminal = start(environ={"TERM": "dumb"})
    terminal.expect("TERM=dumb cannot be drawn on; this is pagetop --once", "1 024 blocks", "status=0")


def test_a_pipe_gets_text_and_json_the_frame(daemon: Daemon) -> None:
    command = [sys.executable, "-P", "-m", "pagedd.tui.app", "--runtime-dir", str(daemon.directory)]
    piped = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert "1 024 blocks" in piped.stdout
    assert "is not a terminal; this is pagetop --once" in piped.stderr
    as_json = subprocess.run([*command, "--once", "--json"], check=True, capture_output=True, text=True, timeout=60)
    assert '"num_blocks":1024' in as_json.stdout


def test_without_a_daemon_it_says_where_it_looked_and_waits_for_one(
    start: Callable[..., Terminal], daemon: Daemon
) -> None:
    daemon.stop()
    terminal = start()
    terminal.expect("No daemon to watch", str(daemon.directory / "stats.sock"), "make run", "pagetop --demo")
    daemon.start()
    terminal.expect("KV cache", "live")


def test_without_a_daemon_once_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "pagedd.tui.app", "--once", "--runtime-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == os.EX_UNAVAILABLE
    assert "no daemon listens there" in result.stderr
