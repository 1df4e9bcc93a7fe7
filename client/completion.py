"""Shell completion of the three programs, made by shtab from the parsers that read their command lines.

Owns how a flag's metavar says what may follow it: `FILE` and `PATH` are files, `DIR` is a folder, `a|b` are choices.
"""

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """What `shell`, one of `SHELLS`, has to read to complete the program of `parser`. Marks up the parser's actions."""
    import shtab  # no command but this one needs it

    follow = {"FILE": shtab.FILE, "PATH": shtab.FILE, "DIR": shtab.DIRECTORY}
    for action in actions_of(parser):
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if "|" in metavar:
            action.choices = metavar.split("|")
        elif metavar in follow:
            action.complete = follow[metavar]  # type: ignore[attr-defined] # where shtab looks
    script: str = shtab.complete(parser, shell)
    return script


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every flag and argument of a parser and of its commands'."""
    for action in parser._actions:
        yield action
        for command in commands_of(action).values():
            yield from actions_of(command)


def commands_of(action: argparse.Action) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands by name; empty for an action that is not the choice of a command."""
    return dict(action.choices) if isinstance(action, argparse._SubParsersAction) else {}
