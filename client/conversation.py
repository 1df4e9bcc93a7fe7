"""`pagectl chat`: a conversation at the terminal, or one question a line from a pipe.

Owns the turns and what Ctrl-C and Ctrl-D mean. Knows no socket: it asks a `Client`.
"""

import contextlib
import sys
from collections.abc import Callable

from pagedd.client.errors import PageddError
from pagedd.client.options import SamplingOptions
from pagedd.client.protocol import ChatMessage
from pagedd.client.sync import Client

HELP = """\
/reset  forget the conversation    /help  this text
Ctrl-C  stop the answer            Ctrl-D  leave"""


class Conversation:
    """The turns so far. A turn that was refused leaves no trace; one that was stopped keeps what was said."""

    def __init__(
        self,
        client: Client,
        write: Callable[[str], None],
        *,
        system: str | None,
        model: str,
        priority: int,
        sampling: SamplingOptions,
    ) -> None:
        self._client = client
        self._write = write
        self._opening = [] if system is None else [ChatMessage(role="system", content=system)]
        self._turns: list[ChatMessage] = []
        self._model = model
        self._priority = priority
        self._sampling = sampling

    def say(self, text: str) -> None:
        """Asks and writes the answer as it comes. Raises `PageddError`, and `KeyboardInterrupt` when stopped."""
        question = ChatMessage(role="user", content=text)
        answer = ""
        try:
            # Leaving the loop, however, cancels the request.
            for delta in self._client.chat(
                [*self._opening, *self._turns, question],
                model=self._model,
                priority=self._priority,
                **self._sampling,
            ):
                answer += delta.text
                self._write(delta.text)
            self._write("\n")
        except KeyboardInterrupt:
            if answer:
                self._remember(question, answer)
            raise
        self._remember(question, answer)

    def _remember(self, question: ChatMessage, answer: str) -> None:
        self._turns += [question, ChatMessage(role="assistant", content=answer)]

    def reset(self) -> None:
        self._turns.clear()


def talk_at_terminal(conversation: Conversation) -> None:
    """Reads lines with editing and history until Ctrl-D. A refusal is shown, and the conversation goes on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # Its import is what gives `input` editing.

    print(HELP)
    while True:
        try:
            _take_line(conversation, input("> ").strip())
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except PageddError as error:
            print(f"pagectl: {error}", file=sys.stderr)


def _take_line(conversation: Conversation, line: str) -> None:
    match line:
        case "":
            pass
        case "/reset":
            conversation.reset()
            print("(forgotten)")
        case "/help":
            print(HELP)
        case _ if line.startswith("/"):
            print(f"{line.split()[0]} is not known here\n{HELP}")
        case _:
            conversation.say(line)


def talk_through_pipe(conversation: Conversation) -> None:
    """Answers each line of standard input. Raises `PageddError` at the first refusal: the next would lack context."""
    for line in sys.stdin:
        if line.strip() == "/reset":
            conversation.reset()
        elif line.strip():
            conversation.say(line.strip())
