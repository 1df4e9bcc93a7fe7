"""The `pagedd` command. Bare `pagedd` serves; the other commands prepare for that.

Exit statuses are an interface (systemd's unit and scripts read them): see `EXIT_STATUSES`. Imports nothing heavy before
a command needs it, because `/health` is to answer within a second of the start.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pagedd.client.errors import PageddError
from pagedd.client.exit_statuses import MODEL_STATUSES
from pagedd.daemon import logs

# Numbers of sysexits.h. The unit does not restart the daemon after 65, 69, 75 and 78: waiting would not help.
EXIT_STATUSES = MODEL_STATUSES | {
    "already_running": os.EX_TEMPFAIL,
    "unknown_setting": os.EX_CONFIG,
    "invalid_setting": os.EX_CONFIG,
    "poor_kv_quality": os.EX_CONFIG,
    "no_kv_memory": os.EX_OSERR,
    "no_host_memory": os.EX_OSERR,
    "out_of_memory": os.EX_OSERR,
}


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if arguments == ["--version"]:
            return version([])
        if arguments and not arguments[0].startswith("-"):
            return _command(arguments[0]).run(arguments[1:])
        return serve(arguments)
    except PageddError as error:
        priority = "<2>" if logs.writes_to_journal(sys.stderr, os.environ) else ""
        print(f"{priority}pagedd: {error}", file=sys.stderr)
        return exit_status(error)


def exit_status(error: PageddError) -> int:
    return EXIT_STATUSES.get(error.code, os.EX_SOFTWARE)


def serve(argv: list[str]) -> int:
    from pagedd.daemon.config import load_config

    if "--help" in argv or "-h" in argv:
        print(usage())
    # Until the event loop hears it: a reload in the first instants has nothing to change, and ends nothing.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    config = load_config(argv).config
    from pagedd.daemon.server import run

    run(config, lambda: load_config(argv).config)
    return 0


def pull(argv: list[str]) -> int:
    from pagedd.daemon.models import pull_model

    print(pull_model(_only_name("pull", argv), report=_report))
    return 0


def prepare(argv: list[str]) -> int:
    from pagedd.daemon.models import resolve_model

    print(resolve_model(_only_name("prepare", argv), report=_report))
    return 0


def tune(argv: list[str]) -> int:
    from pagedd.daemon.tune.command import EXIT_INTERRUPTED
    from pagedd.daemon.tune.command import tune as run_tune

    try:
        return run_tune(argv, _report)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def check_config(argv: list[str]) -> int:
    import asyncio

    from pagedd.daemon.api_keys import configured_keys
    from pagedd.daemon.config import load_config
    from pagedd.daemon.config_check import check_startable

    loaded = load_config(argv, program="pagedd check-config")
    chosen: Mapping[str, object] = {}
    try:
        configured_keys(loaded.config.api_key_file, loaded.config.quota.key)
        chosen = asyncio.run(check_startable(loaded.config, _report))
    finally:
        for line in loaded.explain(chosen):
            print(line)
        sys.stdout.flush()
    return 0


def config_table(argv: list[str]) -> int:
    from pagedd.daemon.config import DaemonConfig
    from pagedd.daemon.settings import markdown_table

    print(markdown_table(DaemonConfig))
    return 0


def hash_key(argv: list[str]) -> int:
    from getpass import getpass

    from pagedd.daemon.api_keys import hash_line

    key = getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    print(hash_line(key.strip(), *argv))
    return 0


def completion(argv: list[str]) -> int:
    from pagedd.client.completion import SHELLS, completion_script

    if len(argv) != 1 or argv[0] not in SHELLS:
        raise PageddError("invalid_setting", f"pagedd completion {' '.join(argv)}: it takes one of {', '.join(SHELLS)}")
    from pagedd.daemon.command_line import make_parser

    print(completion_script(make_parser(), argv[0]))
    return 0


def version(argv: list[str]) -> int:
    from importlib.metadata import version as installed_version

    print(f"pagedd {installed_version('pagedd')}")
    return 0


class Command(NamedTuple):
    """One of the commands; `arguments` as they are shown, `help` without a full stop."""

    run: Callable[[list[str]], int]
    arguments: str
    help: str


COMMANDS = {
    "pull": Command(pull, "[NAME]", "Fetch a model and verify it; print where it is"),
    "prepare": Command(prepare, "[NAME]", "Fetch it and make what the daemon needs to start quickly"),
    "tune": Command(tune, "[FLAGS]", "Try settings on the model and a load; print what each is worth"),
    "check-config": Command(check_config, "[FLAGS]", "Print every setting and its origin; check that they can serve"),
    "config-table": Command(config_table, "", "Print the settings as a Markdown table"),
    "hash-key": Command(hash_key, "[NAME [admin]]", "Print the line of api_key_file for the key on standard input"),
    "completion": Command(completion, "SHELL", "Print what bash, zsh or fish reads to complete pagedd's line"),
    "version": Command(version, "", "Print the version"),
}


def usage() -> str:
    """What `pagedd --help` says before the flags."""
    rows = [("[FLAGS]", "Serve a model (pagedd --help lists the flags)")]
    rows += [(f"{name} {command.arguments}".rstrip(), command.help) for name, command in COMMANDS.items()]
    lines = [f"pagedd {line:<30} {help[0].lower()}{help[1:]}" for line, help in rows]
    return "usage: " + "\n       ".join(lines) + "\n"


def _only_name(command: str, argv: list[str]) -> str:
    from pagedd.daemon.config import DEFAULT_MODEL

    if len(argv) > 1 or any(argument.startswith("-") for argument in argv):
        raise PageddError("invalid_setting", f"pagedd {command} takes one model name, not {' '.join(argv)}")
    return argv[0] if argv else DEFAULT_MODEL


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _command(name: str) -> Command:
    if name not in COMMANDS:
        import difflib

        nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.7)
        hint = f"did you mean pagedd {nearest[0]}?" if nearest else f"the commands are {', '.join(sorted(COMMANDS))}"
        raise PageddError("unknown_setting", f"command {name}: there is none of that name; {hint}")
    return COMMANDS[name]


if __name__ == "__main__":
    sys.exit(main())
