"""The whole command line of `pagedd` as one parser: for shell completion and the manual, which have to see it all.

`cli.py` reads a command line, without this: it loads only what the command at hand needs.
"""

import argparse
import re

from pagedd.client.completion import SHELLS
from pagedd.daemon.cli import COMMANDS, FLAGS
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.setting import settings_of
from pagedd.daemon.settings import add_flags
from pagedd.daemon.tune.command import add_tune_flags


def make_parser() -> argparse.ArgumentParser:
    description = "Serve a language model to the programs of this machine."
    parser = argparse.ArgumentParser(prog="pagedd", description=description)
    parser.add_argument("--version", action="store_true", help="print the version")
    settings = settings_of(DaemonConfig)
    add_flags(parser, settings)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help, description=f"{command.help}.")
        if name == "tune":
            add_tune_flags(subparser)
        if command.arguments == FLAGS:
            add_flags(subparser, settings)
        elif command.arguments == "SHELL":
            subparser.add_argument("shell", metavar="|".join(SHELLS), help="the shell that is to read it")
        else:
            for word in re.findall(r"\w+", command.arguments):
                subparser.add_argument(word, nargs="?", help="")
    return parser
