"""The `pagectl` command: ask the daemon for text, look at it, act on it.

Owns flags and exit statuses. What a command does is in `pagectl_commands.py`.
"""

import argparse
import io
import os
import sys
from collections.abc import Callable

from pagedd.client import pagectl_commands as commands
from pagedd.client.command_line import CommandLine
from pagedd.client.completion import SHELLS, completion_script
from pagedd.client.errors import PageddError
from pagedd.client.exit_statuses import EXIT_INTERRUPTED, MODEL_STATUSES
from pagedd.client.pagectl_commands import EXIT_REFUSED, SAMPLING_FLAGS
from pagedd.client.render import printable
from pagedd.client.standard_output import until_nobody_reads

# Numbers of sysexits.h, as the daemon's. Argparse gives 2 for a wrong command line.
EXIT_STATUSES = MODEL_STATUSES | {
    "daemon_unreachable": os.EX_UNAVAILABLE,
    "queue_full": os.EX_TEMPFAIL,
    "over_quota": os.EX_TEMPFAIL,
    "engine_loading": os.EX_TEMPFAIL,
    "engine_asleep": os.EX_TEMPFAIL,
    "engine_died": os.EX_TEMPFAIL,
    "device_yielded": os.EX_TEMPFAIL,
    "engine_stalled": os.EX_TEMPFAIL,
    "shutting_down": os.EX_TEMPFAIL,
    "forbidden": os.EX_NOPERM,
}
# `pagectl_commands._print_picture`.
PICTURE_NOTE = "Into a pipe or a file goes what is listed alone: the line about the daemon goes to standard error."
EXIT_HELP = f"""\
exit status: 0 done, {EXIT_REFUSED} refused or failed, 2 wrong command line, {os.EX_DATAERR} a wrong file was fetched,
{os.EX_UNAVAILABLE} no daemon or no such model, {os.EX_TEMPFAIL} try again later, {os.EX_NOPERM} not allowed,
{os.EX_CONFIG} the model or device cannot serve, {EXIT_INTERRUPTED} interrupted
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; the exit status."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # Whatever the locale, what cannot be shown becomes `?` and not a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    given = list(sys.argv[1:] if argv is None else argv)
    with until_nobody_reads():
        return _run(given)


def _run(given: list[str]) -> int:
    runtime_dir, command = _runtime_dir(given)
    if command[:1] == ["tune"]:  # its flags are the daemon's, which only that knows
        commands.exec_tune(command[1:], runtime_dir)
    arguments = make_parser().parse_args(["version"] if given == ["--version"] else given)
    try:
        status: int = arguments.run(arguments)
        return status
    except PageddError as error:
        print(f"pagectl: {printable(str(error))}", file=sys.stderr)
        return EXIT_STATUSES.get(error.code, EXIT_REFUSED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _runtime_dir(given: list[str]) -> tuple[str | None, list[str]]:
    """What `--runtime-dir` says, and the rest of the command line."""
    parser = argparse.ArgumentParser(prog="pagectl", add_help=False, allow_abbrev=False)
    parser.add_argument("--runtime-dir")
    known, rest = parser.parse_known_args(given)
    return known.runtime_dir, rest


def make_parser() -> argparse.ArgumentParser:
    parser = CommandLine(
        prog="pagectl",
        description="Talk to the pagedd daemon of this machine.",
        epilog=EXIT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runtime-dir", metavar="DIR", help="folder of the daemon's sockets ($PAGEDD_RUNTIME_DIR)")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], help: str, note: str | None = None
    ) -> argparse.ArgumentParser:
        subparser = subparsers.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".", epilog=note)
        subparser.set_defaults(run=run)
        return subparser

    generate = command("generate", commands.run_generate, "continue a text")
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text; - or nothing reads standard input")
    _add_request_flags(generate)
    generate.add_argument("--n", type=int, default=1, metavar="N", help="answers; more than one is not streamed")
    generate.add_argument("--no-stream", action="store_true", help="print the answer when it is whole")
    generate.add_argument("--json", action="store_true", help="print one JSON object with texts, token ids and usage")

    chat = command("chat", commands.run_chat, "hold a conversation; from a pipe, answer each line")
    chat.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    _add_request_flags(chat)

    ps = command("ps", commands.run_ps, "list the live requests", PICTURE_NOTE)
    ps.add_argument("--json", action="store_true", help="as one JSON array, block tables included")
    blocks = command("blocks", commands.run_blocks, "draw the KV pool, one character a block", PICTURE_NOTE)
    blocks.add_argument("--json", action="store_true", help="as one JSON object, null when the engine has none to show")

    prefixes = command("prefixes", commands.run_prefixes, "show what the prefix cache holds, as a tree")
    prefixes.add_argument("--limit", type=int, default=100, metavar="N", help="most rows (default %(default)s)")
    prefixes.add_argument("--json", action="store_true", help="as one JSON object")

    evict = command(
        "evict",
        commands.run_evict,
        "forget a prefix and all that continues it (needs the service owner's rights)",
    )
    evict.add_argument("digest", metavar="DIGEST", help="as `pagectl prefixes` shows it")

    events = command("events", commands.run_events, "list what happened lately and why")
    events.add_argument("--json", action="store_true", help="as one JSON array")

    stats = command("stats", commands.run_stats, "print the daemon's figures", PICTURE_NOTE)
    stats.add_argument("--json", action="store_true", help="as one JSON object, requests and block tables included")
    stats.add_argument("--watch", action="store_true", help="go on, as the daemon publishes")

    doctor = command("doctor", commands.run_doctor, "say what should be changed, judging by the last minutes of work")
    doctor.add_argument("--json", action="store_true", help="as one JSON array")

    command(
        "tune",
        commands.run_tune,
        "try settings on the model and a load, and print what each is worth (tune --help)",
    )

    replay = command(
        "replay", commands.run_replay, "send the requests of a log again, as the setting request_log has it"
    )
    replay.add_argument("file", metavar="FILE", help="JSON lines")
    replay.add_argument("--speed", type=float, default=1.0, metavar="X", help="times as fast as they came (default 1)")

    usage = command("usage", commands.run_usage, "list who has used how much, and what is left of their quotas")
    usage.add_argument("--json", action="store_true", help="as one JSON object, with costs")

    cost = command(
        "cost", commands.run_cost, "print the energy and the money that a token takes, now and since the start"
    )
    cost.add_argument("--json", action="store_true", help="as one JSON object, with usage")

    cancel = command("cancel", commands.run_cancel, "end a live request of anybody (needs the service owner's rights)")
    cancel.add_argument("request_id", metavar="ID", help="as `pagectl ps` shows it")

    command(
        "sleep",
        commands.run_sleep,
        "end the engine and give its memory back; a request wakes it (service owner's rights)",
    )
    command("wake", commands.run_wake, "start the engine again now (needs the service owner's rights)")
    load = command("load", commands.run_load, "serve another model; requests wait for it (service owner's rights)")
    load.add_argument("model", metavar="MODEL", help="a known name, a Hugging Face name, or a path")
    load.add_argument("--name", metavar="NAME", help="under which clients ask for it (default the model's own)")
    priority = command(
        "priority",
        commands.run_priority,
        "change how urgent a live request is (needs the service owner's rights)",
    )
    priority.add_argument("request_id", metavar="ID", help="as `pagectl ps` shows it")
    priority.add_argument("priority", type=int, metavar="N", help="-100 to 100, higher is more urgent")

    pull = command("pull", commands.run_pull, "fetch a model into the cache and verify it")
    pull.add_argument("name", metavar="NAME", help="a known name, or a Hugging Face name")

    completion = command("completion", run_completion, "print what a shell reads to complete pagectl's line")
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")

    command("version", commands.run_version, "print the versions of pagectl and of the daemon")
    return parser


def run_completion(arguments: argparse.Namespace) -> int:
    print(completion_script(make_parser(), arguments.shell))
    return 0


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    for flag in SAMPLING_FLAGS:
        name = "--" + flag.field.replace("_", "-")
        metavar = flag.field.rsplit("_", 1)[-1].upper()
        parser.add_argument(name, type=flag.kind, metavar=metavar, help=flag.help)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end of text")
    parser.add_argument("--priority", type=int, default=0, metavar="P", help="-100 to 100, higher is more urgent")
    parser.add_argument("--model", default="default", metavar="NAME", help="the served model's name")
    parser.add_argument(
        "--no-wait", action="store_true", help="fail at once while the daemon loads its model or wakes its engine"
    )


if __name__ == "__main__":
    sys.exit(main())
