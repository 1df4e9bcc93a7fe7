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
        """Asks and writes the answer as it comes. Ctrl-C ends the answer. Raises `PageddError`."""
        question = ChatMessage(role="user", content=text)
        answer = ""
        # Leaving the loop, however, cancels the request.
        with contextlib.suppress(KeyboardInterrupt):
            for delta in self._client.chat(
                [*self._opening, *self._turns, question],
                model=self._model,
                priority=self._priority,
                **self._sampling,
            ):
                self._write(delta.text)
                answer += delta.text
        self._write("\n")
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
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        match line.strip():
            case "":
                continue
            case "/reset":
                conversation.reset()
                print("(forgotten)")
            case "/help":
                print(HELP)
            case text if text.startswith("/"):
                print(f"{text.split()[0]} is not known here\n{HELP}")
            case text:
                try:
                    conversation.say(text)
                except PageddError as error:
                    print(f"pagectl: {error}", file=sys.stderr)


def talk_through_pipe(conversation: Conversation) -> None:
    """Answers each line of standard input. Raises `PageddError` at the first refusal: the next would lack context."""
    for line in sys.stdin:
        if line.strip() == "/reset":
            conversation.reset()
        elif line.strip():
            conversation.say(line.strip())
