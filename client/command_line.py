"""A command line that names the nearest word when it does not know one, under the usage of the command at hand."""

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from pagedd.client.completion import commands_of
from pagedd.client.nearest import did_you_mean


class CommandLine(argparse.ArgumentParser):
    """An `ArgumentParser`, also for the commands of one; a wrong line ends the program with status 2."""

    def parse_known_args(  # type: ignore[override] # typeshed's overloads are one signature here
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if self._has_commands and words and words[0].startswith("-") and not self._takes(words[0]):
            self.error(self._what_is_wrong(words[:1]))  # or what follows it would be taken for the command
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:  # said here and not by the parser above, which has other flags and another usage
            self.error(self._what_is_wrong(unknown))
        return parsed, unknown

    def _what_is_wrong(self, unknown: list[str]) -> str:
        flags = [word.split("=")[0] for word in unknown if word.startswith("-")]
        if not flags:
            return f"too many arguments: {shlex.join(unknown)}; a text of several words is one in quotes"
        return f"there is no flag {flags[0]}{_hint(flags[0], self._flags)}"

    @property
    def _flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    @property
    def _has_commands(self) -> bool:
        return any(commands_of(action) for action in self._actions)

    def _takes(self, word: str) -> bool:
        return any(flag.startswith(word.split("=")[0]) for flag in self._flags)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = f"{action.metavar or action.dest}".lower()
            raise argparse.ArgumentError(None, f"there is no {name} {value}{_hint(str(value), action.choices)}")


def _hint(word: str, known: Iterable[str]) -> str:
    known = list(known)
    return f"; {did_you_mean(word, known, 'there are ' + ', '.join(known))}"
