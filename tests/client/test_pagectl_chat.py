"""`pagectl chat` at a terminal and through a pipe."""

import os
import pty
import signal
import termios

import pytest

from pagedd.client.protocol import Cancel, Chat, ChatMessage, Delta, Failed

from .fake_daemon import FakeDaemon
from .pagectl_calls import Run, Start, type_in


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

    def __init__(self, start: Start, *arguments: str) -> None:
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


def test_chat_at_a_terminal_stops_answers_resets_and_leaves(daemon: FakeDaemon, start: Start) -> None:
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
