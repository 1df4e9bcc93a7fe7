"""The command as a person or a script meets it."""

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedd.client import pagectl
from pagedd.client.protocol import (
    Cancel,
    Chat,
    ChatMessage,
    Delta,
    Failed,
    Generate,
    Load,
    Sampling,
    SetPriority,
    Sleep,
    Wake,
)
from pagedd.client.questions import EvictPrefix, GetPrefixes
from pagedd.client.stats_frame import Event

FakeDaemon = Any
Run = Callable[..., int]


@pytest.fixture
def run(directory: Path) -> Run:
    """Runs the command in this process; the exit status."""
    return lambda *arguments: pagectl.main(["--runtime-dir", str(directory), *arguments])


@pytest.fixture
def start(directory: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the command as a process."""
    started: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: str, environ: dict[str, str] | None = None, **kwargs: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "pagedd.client.pagectl", "--runtime-dir", str(directory), *arguments]
        process = subprocess.Popen(command, env={**os.environ, **(environ or {})}, **kwargs)
        started.append(process)
        return process

    yield popen
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                if stream:
                    stream.close()


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


def test_every_sampling_flag_is_a_field_of_the_protocol() -> None:
    assert {flag.field for flag in pagectl.SAMPLING_FLAGS} <= set(Sampling.__struct_fields__)


def test_generate_prints_the_text_as_it_comes(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "count", "--max-tokens", "3", "--temperature", "0", "--top-p", "0.9") == 0
    assert capsys.readouterr().out == "one two three\n"
    asked = daemon.hear(Generate)
    assert (asked.prompt, asked.stream) == ("count", True)
    assert asked.sampling == Sampling(max_tokens=3, temperature=0.0, top_p=0.9)


def test_generate_carries_every_flag(daemon: FakeDaemon, run: Run) -> None:
    flags = "--seed 7 --stop . --stop END --no-stream --priority -5 --model tiny --ignore-eos --min-p 0.1 --top-k 4"
    assert run("generate", "x", *flags.split()) == 0
    asked = daemon.hear(Generate)
    assert (asked.stream, asked.priority, asked.model) == (False, -5, "tiny")
    assert asked.sampling == Sampling(seed=7, stop=[".", "END"], ignore_eos=True, min_p=0.1, top_k=4)


def test_generate_json_is_one_object_with_texts_ids_and_usage(
    daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "x", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["choices"][0]["text"] == "one two three"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0}
    assert daemon.hear(Generate).stream is False


def test_several_answers_are_told_apart(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(message: Generate) -> list[Any]:
        done = daemon.default_answer(message)[-1]
        second = type(done.choices[0])(index=1, text="uno", token_ids=[1], finish_reason="stop")
        done.choices.append(second)
        return [done]

    daemon.answer = answer
    assert run("generate", "x", "--n", "2") == 0
    assert capsys.readouterr().out == "--- 0\none two three\n--- 1\nuno\n"
    asked = daemon.hear(Generate)
    assert (asked.sampling.n, asked.stream) == (2, False)


@pytest.mark.parametrize("flags", [[], ["--no-stream"], ["--json"]])
def test_an_answer_that_somebody_cancelled_is_not_taken_for_a_whole_one(
    daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    def answer(message: Generate) -> list[Any]:
        *deltas, done = daemon.default_answer(message)
        done.choices[0].finish_reason = "abort"
        return [*deltas, done]

    daemon.answer = answer
    assert run("generate", "x", *flags) == 1
    printed = capsys.readouterr()
    assert "one two three" in printed.out
    assert printed.err == "pagectl: the request was cancelled; the answer is not whole\n"


@pytest.mark.parametrize(("command", "message"), [("sleep", Sleep), ("wake", Wake)])
def test_the_engine_is_put_to_sleep_and_woken(daemon: FakeDaemon, run: Run, command: str, message: type) -> None:
    assert run(command) == 0
    assert isinstance(daemon.hear(message, "admin"), message)


def test_a_command_without_an_answer_says_at_a_terminal_that_it_is_done(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("wake") == 0
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run("wake") == 0
    assert capsys.readouterr() == ("", "the engine is starting, unless it was awake\n")


def test_a_log_is_replayed_and_summed_up(
    daemon: FakeDaemon, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text('{"prompt_token_ids": [1, 2], "output_tokens": 3, "priority": 5}\n')
    assert run("replay", str(log)) == 0
    asked = daemon.hear(Generate)
    assert (asked.prompt_token_ids, asked.sampling.max_tokens, asked.priority) == ([1, 2], 3, 5)
    assert capsys.readouterr().out.startswith("answered 1 in ")
    for file, speed in ((str(log), "0"), (str(tmp_path / "none"), "1")):
        assert run("replay", file, "--speed", speed) == pagectl.EXIT_REFUSED


def test_a_model_is_loaded_by_its_name_or_by_its_whole_path(
    daemon: FakeDaemon, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run("load", "mine", "--name", "m") == 0
    asked = daemon.hear(Load, "admin")
    assert (asked.model, asked.served_name) == (str(tmp_path / "mine"), "m")
    assert run("load", "org/model") == 0
    assert daemon.hear(Load, "admin").model == "org/model"


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "-"]])
def test_the_prompt_can_come_from_standard_input(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    type_in(monkeypatch, "two\nlines 世\n")
    assert run(*arguments) == 0
    assert daemon.hear(Generate).prompt == "two\nlines 世\n"


def test_a_prompt_that_is_not_utf8_arrives_readable(daemon: FakeDaemon, start: Callable[..., Any]) -> None:
    process = start("generate", b"caf\xe9", stdout=subprocess.DEVNULL)
    assert daemon.hear(Generate).prompt == "caf\ufffd"
    assert process.wait(60) == 0


def test_a_refusal_is_one_line_and_a_status(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for code, status in [
        ("prompt_too_long", 1),
        ("queue_full", 75),
        ("engine_loading", 75),
        ("forbidden", 77),
        ("model_unavailable", 69),
    ]:
        daemon.answer = lambda message, code=code: [Failed(id=message.id, code=code, message="so it is")]
        assert run("generate", "x", "--no-wait") == status
        assert capsys.readouterr().err == f"pagectl: {code}: so it is\n"


def test_without_a_daemon_it_says_what_to_do(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["generate", "x"],
        ["ps"],
        ["blocks"],
        ["stats"],
        ["stats", "--watch"],
        ["cancel", "r1"],
        ["priority", "r1", "5"],
    ):
        assert run(*arguments) == 69
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("pagectl: daemon_unreachable: ")
        assert "systemctl start pagedd" in err


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["generate", "x", "--n", "two"], ["cancel"], ["priority", "r1", "high"]]
)
def test_a_wrong_command_line_is_status_2(run: Run, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        run(*arguments)
    assert exit.value.code == 2
    assert "usage: pagectl" in capsys.readouterr().err


def test_ps_and_blocks_draw_the_frame(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ps") == 0
    out, err = capsys.readouterr()
    assert out.startswith("map  id  who")
    assert "a    r1  ana     0  decode" in out
    assert err.startswith("tiny · cpu"), "about the daemon, which a pipe is not asked for"
    assert run("blocks") == 0
    assert "0000 aS·▒b▒··" in capsys.readouterr().out


def test_ps_and_blocks_are_json_for_scripts(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ps", "--json") == 0
    assert [row["request_id"] for row in json.loads(capsys.readouterr().out)] == ["r1", "r2", "r3"]
    assert run("blocks", "--json") == 0
    assert json.loads(capsys.readouterr().out)["block_size"] == 4


def test_stats_are_text_or_json(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats") == 0
    assert "kv_usage              50.0  %" in capsys.readouterr().out
    assert run("stats", "--json") == 0
    frame = json.loads(capsys.readouterr().out)
    assert frame["figures"]["kv_usage"] == 0.5
    assert frame["requests"][1]["block_table"] == [1, 4]


def test_watching_stats_prints_each_frame_until_interrupted(daemon: FakeDaemon, start: Callable[..., Any]) -> None:
    process = start("stats", "--watch", "--json", stdout=subprocess.PIPE)
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(0.02):
            daemon.publish(daemon.frame)

    threading.Thread(target=publish, daemon=True).start()
    assert [json.loads(process.stdout.readline())["model"] for _ in range(3)] == ["tiny"] * 3
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    stop.set()


def test_usage_and_cost_are_text_or_json(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("usage") == run("cost") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("who ")
    assert "requests x1, tokens x2" in printed
    assert "J / output token" in printed
    assert run("usage", "--json") == run("cost", "--json") == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["callers"] == second["callers"]
    assert first["since_start"]["joules_per_token"] == 0.25


def test_a_quota_that_is_used_up_is_a_reason_to_try_again_later(
    daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer = lambda message: [Failed(id=message.id, code="over_quota", message="try again", retry_after_s=2.0)]
    assert run("generate", "x") == os.EX_TEMPFAIL
    assert "over_quota: try again" in capsys.readouterr().err


def test_prefixes_and_events_are_text_or_json(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.frame.events = [Event(seq=1, time_s=0.0, kind="engine", reason="ready")]
    assert run("prefixes") == run("events") == 0
    text = capsys.readouterr().out
    assert "d1           2       8" in text
    assert "engine    ready" in text
    assert run("prefixes", "--json") == run("events", "--json") == 0
    tree, events = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert tree["nodes"][0]["user"] == "ana"
    assert events[0]["reason"] == "ready"
    assert run("prefixes", "--limit", "7") == 0
    assert [daemon.hear(GetPrefixes).limit for _ in range(3)] == [100, 100, 7]


def test_a_prefix_is_evicted_through_the_admin_socket(
    daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("evict", "d1") == 0
    assert daemon.hear(EvictPrefix, socket="admin").digest == "d1"
    assert capsys.readouterr().out == "2 blocks are free, 0 are in use and stay\n"


def test_what_the_disk_keeps_of_an_evicted_prefix_is_no_success(
    daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("evict", "stuck") == 1
    said = capsys.readouterr()
    assert "3 lie in files on the disk that cannot be removed, and are back after a restart" in said.err
    assert said.out.endswith("the disk has lost 2 more, of other prefixes, that lay in the same files\n")


def test_a_priority_is_set_through_the_admin_socket(daemon: FakeDaemon, run: Run) -> None:
    assert run("priority", "r1", "20") == run("priority", "r1", "-20") == 0
    said = [daemon.hear(SetPriority, socket="admin") for _ in range(2)]
    assert [(message.target, message.priority) for message in said] == [("r1", 20), ("r1", -20)]


def test_cancel_goes_to_the_admin_socket(daemon: FakeDaemon, run: Run) -> None:
    assert run("cancel", "r1") == 0
    assert daemon.hear(Cancel, "admin").target == "r1"


def test_version_names_both_and_is_no_failure_without_a_daemon(
    daemon: FakeDaemon, run: Run, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("version") == 0
    assert capsys.readouterr().out == f"pagectl 0.1.0\npagedd  0.1.0 (ready) at {directory}\n"
    daemon.stop()
    assert run("version") == 0
    assert f"pagedd  not running at {directory} (daemon_unreachable)" in capsys.readouterr().out


def test_version_is_a_flag_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEDD_RUNTIME_DIR", str(directory))
    assert pagectl.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pagectl 0.1.0\n")


def test_pull_runs_the_daemons_own_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(Exception):
        pass

    def execv(program: str, arguments: list[str]) -> None:
        assert program == sys.executable
        assert arguments[1:] == ["-P", "-m", "pagedd.daemon.cli", "pull", "smollm2"]
        raise Replaced

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(Replaced):
        run("pull", "smollm2")


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["tune", "--write"], ["--write"]),
        (["--runtime-dir", "/run/x", "tune"], ["--runtime-dir", "/run/x"]),
        (["--runtime-dir=/run/x", "tune", "--users", "3"], ["--users", "3", "--runtime-dir", "/run/x"]),
        (["--runtime-d", "/run/x", "tune"], ["--runtime-dir", "/run/x"]),
    ],
)
def test_tune_is_told_all_flags(monkeypatch: pytest.MonkeyPatch, given: list[str], passed: list[str]) -> None:
    executed: list[list[str]] = []

    def execv(program: str, arguments: list[str]) -> None:
        executed.append(arguments)
        raise SystemExit

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(SystemExit):
        pagectl.main(given)
    assert executed == [[sys.executable, "-P", "-m", "pagedd.daemon.cli", "tune", *passed]]


def test_chat_through_a_pipe_answers_each_line_with_the_turns_before(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "hi\n\nand?\n/reset\nagain\n")
    assert run("chat", "--system", "Be brief.", "--max-tokens", "5") == 0
    assert capsys.readouterr().out == "one two three\n" * 3
    system, hi = ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="hi")
    answer, more = ChatMessage(role="assistant", content="one two three"), ChatMessage(role="user", content="and?")
    assert daemon.hear(Chat).messages == [system, hi]
    asked = daemon.hear(Chat)
    assert asked.messages == [system, hi, answer, more]
    assert asked.sampling.max_tokens == 5
    assert daemon.hear(Chat).messages == [system, ChatMessage(role="user", content="again")]


def test_chat_through_a_pipe_stops_at_the_first_refusal(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer = lambda message: [Failed(id=message.id, code="no_chat_template", message="none")]
    type_in(monkeypatch, "hi\nthere\n")
    assert run("chat") == 1
    assert capsys.readouterr().err == "pagectl: no_chat_template: none\n"


class Terminal:
    """A pseudo-terminal with the command on it."""

    def __init__(self, start: Callable[..., subprocess.Popen[bytes]], *arguments: str) -> None:
        self._master, slave = pty.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        # A session of its own whose terminal this is, so that Ctrl-C reaches the command and not the test.
        self.process = start(
            *arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            environ={"TERM": "dumb", "PYTHONUTF8": "1"},
        )
        os.close(slave)
        self._seen = b""

    def expect(self, text: str) -> None:
        """Reads until `text` has come; what was before it is gone."""
        while text.encode() not in self._seen:
            self._seen += os.read(self._master, 4096)
        self._seen = self._seen.partition(text.encode())[2]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        os.close(self._master)


def test_chat_at_a_terminal_stops_answers_resets_and_leaves(daemon: FakeDaemon, start: Callable[..., Any]) -> None:
    terminal = Terminal(start, "chat")
    terminal.expect("Ctrl-D  leave")
    terminal.expect("> ")

    # Ctrl-C during an answer cancels it; what was said stays in the conversation.
    daemon.answer = lambda message: [Delta(id=message.id, text="I think")] if isinstance(message, Chat) else []
    terminal.type("why?\n")
    terminal.expect("I think")
    terminal.interrupt()
    asked = daemon.hear(Chat)
    assert daemon.hear(Cancel).target == asked.id
    terminal.expect("> ")

    # A refusal is shown and leaves no trace.
    daemon.answer = lambda message: [Failed(id=message.id, code="prompt_too_long", message="9210 tokens")]
    terminal.type("long\n")
    terminal.expect("pagectl: prompt_too_long: 9210 tokens")
    daemon.hear(Chat)

    # What the model says cannot steer the terminal.
    daemon.words = ["\x1b[2Jdone"]
    daemon.answer = daemon.default_answer
    terminal.type("more\n")
    terminal.expect("\ufffd[2Jdone")
    assert [message.content for message in daemon.hear(Chat).messages] == ["why?", "I think", "more"]

    terminal.type("/reset\n")
    terminal.expect("(forgotten)")
    terminal.type("/what\n")
    terminal.expect("/what is not known here")
    terminal.type("fresh\n")
    terminal.expect("done")
    assert [message.content for message in daemon.hear(Chat).messages] == ["fresh"]

    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    terminal.close()


def test_interrupting_at_the_prompt_gives_a_new_prompt(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str | type[BaseException]] = [KeyboardInterrupt, "hi", KeyboardInterrupt, EOFError]

    def read(prompt: str) -> str:
        key = keys.pop(0)
        if isinstance(key, str):
            return key
        raise key

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert run("chat") == 0
    assert daemon.hear(Chat).messages == [ChatMessage(role="user", content="hi")]


def test_interrupting_a_generation_cancels_it(daemon: FakeDaemon, start: Callable[..., Any]) -> None:
    daemon.answer = lambda message: [Delta(id=message.id, text="a")] if isinstance(message, Generate) else []
    process = start("generate", "x", stdout=subprocess.PIPE)
    assert process.stdout.read(1) == b"a"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert daemon.hear(Cancel).target == "1"  # a client counts its requests


def test_a_reader_that_leaves_ends_the_generation_quietly(daemon: FakeDaemon, start: Callable[..., Any]) -> None:
    daemon.answer = lambda message: [Delta(id=message.id, text="a")] if isinstance(message, Generate) else []
    process = start("generate", "x", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1) == b"a"
    process.stdout.close()
    daemon.say(Delta(id="1", text="b"))
    assert process.wait(60) == 141
    assert process.stderr.read() == b""
    daemon.hear(Cancel)


def test_a_terminal_without_unicode_gets_ascii(daemon: FakeDaemon, start: Callable[..., Any]) -> None:
    daemon.words = ["naïve 世"]
    plain = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    process = start("blocks", stdout=subprocess.PIPE, environ=plain)
    assert b"0000 aS.:b:.." in process.stdout.read()
    process = start("generate", "x", stdout=subprocess.PIPE, environ=plain)
    assert process.stdout.read() == b"na?ve ?\n"
    assert process.wait(60) == 0
