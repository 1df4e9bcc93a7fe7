"""Writes the manual pages below a folder, from the parsers of the three programs and the declarations of the settings.

    python -P scripts/manual.py /usr/local/share/man

Owns which sections a page has, and the little of roff's man macros that they need.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from pagedd.client import pagectl
from pagedd.client.completion import commands_of
from pagedd.client.errors import ERROR_KINDS
from pagedd.daemon import command_line
from pagedd.daemon.cli import EXIT_STATUSES
from pagedd.daemon.config import DEFAULT_FILE, DaemonConfig
from pagedd.daemon.setting import KINDS, Setting, settings_of, tables_of
from pagedd.tui import app

# A name to look up, and what is said of it.
Item = tuple[str, str]

_SIGNALS = (
    ("SIGTERM, SIGINT", "Drain for as long as drain_seconds says, then end; the second one ends at once."),
    ("SIGHUP", "Read quotas, API keys and log level anew; a wrong file changes nothing."),
)
_FILES = (
    (str(DEFAULT_FILE), "Settings, see pagedd.toml(5)."),
    ("/run/pagedd, $XDG_RUNTIME_DIR/pagedd", "Sockets of the service, and of a user's own daemon."),
    ("/var/cache/pagedd, ~/.cache/pagedd", "Models and compiled kernels; may be deleted."),
    ("/var/lib/pagedd/crashes, ~/.local/state/pagedd/crashes", "What engines died of, the newest 20."),
)
_EXAMPLE = """\
model = "/srv/models/chat.gguf"
max_num_seqs = 16

[quota]
max_requests = 8
"""
_DAEMON_VARIABLES = (
    ("PAGEDD_CONFIG", "As --config."),
    ("PAGEDD_*", "As the flag of that name: PAGEDD_BLOCK_SIZE is --block-size. Flags come first."),
    ("CXX", "The compiler of the C++ kernels, else g++."),
)
_CLIENT_VARIABLES = (
    ("PAGEDD_RUNTIME_DIR", "Folder of the daemon's sockets, where --runtime-dir names none."),
    ("NO_COLOR", "Set to anything: no colours."),
)


def pages() -> dict[str, str]:
    """The text of each page by its name."""
    daemon, control, top = command_line.make_parser(), pagectl.make_parser(), app.make_parser()
    statuses = [(str(status), meaning) for status, meaning in _exit_statuses()]
    return {
        "pagectl.1": "".join(
            [
                *_program(control, "1", "talk to the pagedd daemon of this machine"),
                _section("EXIT STATUS", _paragraph(pagectl.EXIT_HELP.partition(": ")[2])),
                _section("ENVIRONMENT", _items(_CLIENT_VARIABLES[:1])),
                _see_also("pagetop(1)", "pagedd.toml(5)", "pagedd(8)"),
            ]
        ),
        "pagetop.1": "".join(
            [
                *_program(top, "1", "watch the pagedd daemon of this machine live"),
                _section("ENVIRONMENT", _items(_CLIENT_VARIABLES)),
                _section("NOTES", _paragraph(top.epilog or "")),
                _see_also("pagectl(1)", "pagedd(8)"),
            ]
        ),
        "pagedd.toml.5": "".join(_settings_page()),
        "pagedd.8": "".join(
            [
                *_program(daemon, "8", "serve a language model to the programs of this machine"),
                _section("SIGNALS", _items(_SIGNALS)),
                _section("EXIT STATUS", _items([("0", "Told to stop, and drained."), *statuses])),
                _section("ENVIRONMENT", _items(_DAEMON_VARIABLES)),
                _section("FILES", _items(_FILES)),
                _see_also("pagectl(1)", "pagetop(1)", "pagedd.toml(5)", "systemctl(1)"),
            ]
        ),
    }


def write(folder: Path) -> None:
    """Each page to its section's folder: `man1/pagectl.1`."""
    for name, text in pages().items():
        place = folder / f"man{name[-1]}"
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text, encoding="utf-8")


def _program(parser: argparse.ArgumentParser, section: str, purpose: str) -> Iterator[str]:
    yield _head(parser.prog, section, purpose)
    choices = [action for action in parser._actions if commands_of(action)]
    yield _section("SYNOPSIS", "\n.br\n".join(_synopsis(parser.prog, choices)) + "\n")
    yield _section("DESCRIPTION", _paragraph(parser.description or ""))
    own = _flags(parser)
    for choice in choices:
        yield _section("COMMANDS", "")
        for name, command in commands_of(choice).items():
            arguments, flags = _arguments(command), _flags(command)
            others = [item for item in flags if item not in own]
            takes_own = ["[OPTION ...]"] if len(flags) - len(others) > 1 else []  # --help is one that all have
            line = " ".join([name, *(shown for shown, _ in arguments), *takes_own])
            described = [item for item in arguments if item[1]]
            yield f".SS {_quoted(line)}\n{_paragraph(command.description or '')}{_items([*described, *others])}"
    yield _section("OPTIONS", _items(own))


def _synopsis(program: str, choices: list[argparse.Action]) -> Iterator[str]:
    if not any(choice.required for choice in choices):
        yield f".B {program}\n[\\fIOPTION\\fR ...]"
    for _ in choices:
        yield f".B {program}\n\\fICOMMAND\\fR [\\fIARGUMENT\\fR ...]"


def _flags(parser: argparse.ArgumentParser) -> list[Item]:
    formatter = parser._get_formatter()
    return [
        (formatter._format_action_invocation(action), formatter._expand_help(action))
        for action in parser._actions
        if action.option_strings
    ]


def _arguments(parser: argparse.ArgumentParser) -> list[Item]:
    formatter = parser._get_formatter()
    return [
        (formatter._format_args(action, action.dest), formatter._expand_help(action))
        for action in parser._actions
        if not action.option_strings and not commands_of(action)
    ]


def _settings_page() -> Iterator[str]:
    yield _head("pagedd.toml", "5", "settings of the pagedd daemon")
    yield _section(
        "DESCRIPTION",
        _paragraph(
            f"{DEFAULT_FILE}, or the file that --config names, holds settings in TOML. Flags come before environment "
            "variables, these before the file. An unknown key is an error that names the nearest one; "
            "`pagedd check-config` prints what holds and why. SIGHUP, as `systemctl reload pagedd`, takes over the "
            "table quota, API keys and the log level; all else needs a restart."
        ),
    )
    settings = settings_of(DaemonConfig)
    yield _section("KEYS", _items(_setting(item) for item in settings if not item.table))
    for table in tables_of(DaemonConfig).values():
        subtables = [(f"[{table.name}.{kind}.NAME]", text) for kind, text in table.helps.items()]
        keys = [_setting(item) for item in settings if item.table == table.name]
        yield _section(f"TABLE [{table.name}]", _items([*keys, *subtables]))
    yield _section("EXAMPLE", f".nf\n{_EXAMPLE}.fi\n")
    yield _see_also("pagedd(8)", "pagectl(1)")


def _setting(item: Setting) -> Item:
    values = item.allowed_in_toml or KINDS[item.kind]
    meaning = f'"{item.none}" is {item.none_means}. ' if item.none_means else ""
    flags = ", ".join(item.flags)
    said = f"{item.help} {values[0].upper()}{values[1:]}. {meaning}As {flags} or {item.variable}."
    return f"{item.key} = {item.toml(item.default)}", said


def _exit_statuses() -> Iterator[tuple[int, str]]:
    for status in sorted(set(EXIT_STATUSES.values())):
        meanings = [f"{code}: {ERROR_KINDS[code].meaning}" for code, own in EXIT_STATUSES.items() if own == status]
        yield status, " ".join(meanings)


def _head(name: str, section: str, purpose: str) -> str:
    title = f'.TH {_quoted(name.upper())} {section} "" {_quoted("pagedd " + version("pagedd"))}\n'
    return title + _section("NAME", f"{_text(name)} \\- {_text(purpose)}\n")


def _section(title: str, body: str) -> str:
    return f".SH {_quoted(title)}\n{body}"


def _see_also(*names: str) -> str:
    return _section("SEE ALSO", _paragraph(", ".join(names)))


def _paragraph(text: str) -> str:
    return f"{_text(_one_line(text))}\n" if text.strip() else ""


def _items(items: Iterable[Item]) -> str:
    return "".join(f".TP\n.B {_quoted(name)}\n{_text(_one_line(text))}\n" for name, text in items)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _text(text: str) -> str:
    """Plain words for roff: nothing in them is a request, an escape, or a hyphen where people copy a minus."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _quoted(text: str) -> str:
    """One argument of a macro."""
    return '"' + _text(text).replace('"', "\\(dq") + '"'


if __name__ == "__main__":
    write(Path(sys.argv[1]))
