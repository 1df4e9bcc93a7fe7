"""The `pagedd` command. Bare `pagedd` serves; the other commands prepare for that.

Exit statuses are an interface (systemd's unit and scripts read them): see `EXIT_STATUSES`. Imports nothing heavy before
a command needs it, because `/health` is to answer within a second of the start.
"""

import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pagedd.client.errors import PageddError
from pagedd.client.exit_statuses import EXIT_INTERRUPTED, MODEL_STATUSES
from pagedd.client.standard_output import until_nobody_reads
from pagedd.daemon import logs

log = logging.getLogger(__name__)

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
        return _run(arguments)
    except PageddError as error:
        if logs.writes_json():
            log.critical("%s", error)
        else:
            priority = "<2>" if logs.writes_to_journal(sys.stderr, os.environ) else ""
            print(f"{priority}pagedd: {error}", file=sys.stderr)
        return exit_status(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        return version([])
    if not arguments or arguments[0].startswith("-"):
        return serve(arguments)
    name, *rest = arguments
    with until_nobody_reads():
        return _run_command(name, _command(name), rest)


def _run_command(name: str, command: "Command", arguments: list[str]) -> int:
    if command.arguments != FLAGS:  # whose parser has help of its own
        if "--help" in arguments or "-h" in arguments:
            print(f"usage: pagedd {_line(name)}\n\n{command.help}.")
            return 0
        is_flag = any(argument.startswith("-") for argument in arguments)
        if is_flag or len(arguments) > len(command.arguments.split()):
            takes = command.arguments or "no argument"
            raise PageddError("invalid_setting", f"pagedd {name} takes {takes}, not {shlex.join(arguments)}")
    return command.run(arguments)


def exit_status(error: PageddError) -> int:
    return EXIT_STATUSES.get(error.code, os.EX_SOFTWARE)


def serve(argv: list[str]) -> int:
    from pagedd.daemon.config import load_config

    # Until the event loop hears it: a reload in the first instants has nothing to change, and ends nothing.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with until_nobody_reads():
        if "--help" in argv or "-h" in argv:
            print(usage())
        config = load_config(argv).config
    from pagedd.daemon.server import run

    run(config, lambda: load_config(argv).config)
    return 0


def pull(argv: list[str]) -> int:
    from pagedd.daemon.models import pull_model

    print(pull_model(_model(argv), report=_report))
    return 0


def prepare(argv: list[str]) -> int:
    from pagedd.daemon.models import resolve_model

    print(resolve_model(_model(argv), report=_report))
    return 0


def models(argv: list[str]) -> int:
    from pagedd.daemon.kept_models import kept_models, models_table, remove_model

    match argv:
        case []:
            print("\n".join(models_table(kept_models())))
        case ["remove", name]:
            for model in remove_model(name):
                print(f"{model.folder} is removed: {model.num_bytes / 1e6:.1f} MB")
        case _:
            message = f"pagedd models takes nothing, or remove and a name, not {shlex.join(argv)}"
            raise PageddError("invalid_setting", message)
    return 0


def tune(argv: list[str]) -> int:
    from pagedd.daemon.tune.command import tune as run_tune

    return run_tune(argv, _report)


def check_config(argv: list[str]) -> int:
    import asyncio

    from pagedd.daemon.api_keys import configured_keys
    from pagedd.daemon.config import load_config
    from pagedd.daemon.config_check import check_startable
    from pagedd.daemon.request_log import why_unwritable
    from pagedd.daemon.tls_certificate import configured_certificate

    loaded = load_config(argv, program="pagedd check-config")
    chosen: Mapping[str, object] = {}
    try:
        log_path = loaded.config.request_log
        if log_path is not None and (why := why_unwritable(log_path)) is not None:
            _report(f"request_log {log_path} will not be written: {why}")
        configured_keys(loaded.config.api_key_file, loaded.config.quota.key)
        if (certificate := configured_certificate(loaded.config)) is not None:
            certificate.check_dates()
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

    from pagedd.daemon.api_keys import check_words, hash_line

    check_words(argv)  # before the key is asked for
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


# The arguments of a command that takes the settings'.
FLAGS = "[FLAGS]"


class Command(NamedTuple):
    """One of the commands; `arguments` as they are shown, a word each; `help` without a full stop."""

    run: Callable[[list[str]], int]
    arguments: str
    help: str


COMMANDS = {
    "pull": Command(pull, "[NAME]", "Fetch a model and verify it; print where it is"),
    "prepare": Command(prepare, "[NAME]", "Fetch it and make what the daemon needs to start quickly"),
    "models": Command(models, "[remove NAME]", "List the fetched models, or remove one that no daemon serves"),
    "tune": Command(tune, FLAGS, "Try settings on the model and a load; print what each is worth"),
    "check-config": Command(check_config, FLAGS, "Print every setting and its origin; check that they can serve"),
    "config-table": Command(config_table, "", "Print the settings as a Markdown table"),
    "hash-key": Command(hash_key, "[NAME [admin]]", "Print the line of api_key_file for the key on standard input"),
    "completion": Command(completion, "SHELL", "Print what bash, zsh or fish reads to complete pagedd's line"),
    "version": Command(version, "", "Print the version"),
}


def usage() -> str:
    """What `pagedd --help` says before the flags."""
    rows = [(FLAGS, "Serve a model (pagedd --help lists the flags)")]
    rows += [(_line(name), command.help) for name, command in COMMANDS.items()]
    lines = [f"pagedd {line:<30} {help[0].lower()}{help[1:]}" for line, help in rows]
    return "usage: " + "\n       ".join(lines) + "\n"


def _line(name: str) -> str:
    return f"{name} {COMMANDS[name].arguments}".rstrip()


def _model(argv: list[str]) -> str:
    from pagedd.daemon.config import DEFAULT_MODEL

    return argv[0] if argv else DEFAULT_MODEL


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _command(name: str) -> Command:
    if name not in COMMANDS:
        from pagedd.client.nearest import nearest

        meant = nearest(name, COMMANDS)
        hint = f"the commands are {', '.join(sorted(COMMANDS))}" if meant is None else f"did you mean pagedd {meant}?"
        raise PageddError("unknown_setting", f"command {name}: there is none of that name; {hint}")
    return COMMANDS[name]


if __name__ == "__main__":
    sys.exit(main())
