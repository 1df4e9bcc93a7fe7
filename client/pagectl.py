"""The `pagectl` command: ask the daemon for text, look at it, act on it.

Owns flags, exit statuses and what goes to which stream. What is asked is in `sync.py`, how answers look in `render.py`,
the turns of a chat in `conversation.py`.
"""

import argparse
import importlib.metadata
import io
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, cast

import msgspec

from pagedd.client import conversation
from pagedd.client.aio import LOAD_WAIT_S
from pagedd.client.completion import SHELLS, completion_script
from pagedd.client.endpoints import client_endpoints
from pagedd.client.errors import PageddError
from pagedd.client.options import SamplingOptions
from pagedd.client.render import (
    Glyphs,
    printable,
    redrawn,
    render_blocks,
    render_events,
    render_figures,
    render_prefixes,
    render_requests,
)
from pagedd.client.render_advice import render_advice
from pagedd.client.render_usage import render_cost, render_usage
from pagedd.client.stats_frame import StatsFrame
from pagedd.client.sync import Client

EXIT_REFUSED = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
# Numbers of sysexits.h, as the daemon's. Argparse gives 2 for a wrong command line.
EXIT_STATUSES = {
    "daemon_unreachable": os.EX_UNAVAILABLE,
    "queue_full": os.EX_TEMPFAIL,
    "over_quota": os.EX_TEMPFAIL,
    "engine_loading": os.EX_TEMPFAIL,
    "engine_asleep": os.EX_TEMPFAIL,
    "engine_died": os.EX_TEMPFAIL,
    "engine_stalled": os.EX_TEMPFAIL,
    "shutting_down": os.EX_TEMPFAIL,
    "forbidden": os.EX_NOPERM,
}
EXIT_HELP = f"""\
exit status: 0 done, {EXIT_REFUSED} refused or failed, 2 wrong command line, {os.EX_UNAVAILABLE} no daemon,
{os.EX_TEMPFAIL} try again later, {os.EX_NOPERM} not allowed, {EXIT_INTERRUPTED} interrupted
"""


class SamplingFlag(NamedTuple):
    """`field` of `protocol.Sampling` as a flag: `top_p` is `--top-p`."""

    field: str
    kind: Callable[[str], Any]
    help: str


SAMPLING_FLAGS = (
    SamplingFlag("max_tokens", int, "most tokens to produce"),
    SamplingFlag("min_tokens", int, "do not end before this many tokens"),
    SamplingFlag("temperature", float, "0 is greedy (default 1)"),
    SamplingFlag("top_k", int, "keep the K most likely tokens (default all)"),
    SamplingFlag("top_p", float, "keep the most likely tokens that together reach P (default 1)"),
    SamplingFlag("min_p", float, "keep tokens at least P times as likely as the best (default 0)"),
    SamplingFlag("repetition_penalty", float, "above 1 discourages what prompt and output hold (default 1)"),
    SamplingFlag("presence_penalty", float, "subtracted once for a token that is out (default 0)"),
    SamplingFlag("frequency_penalty", float, "subtracted for each time a token is out (default 0)"),
    SamplingFlag("seed", int, "the same seed gives the same text"),
)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; the exit status."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # Whatever the locale, what cannot be shown becomes `?` and not a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    given = list(sys.argv[1:] if argv is None else argv)
    runtime_dir, command = _runtime_dir(given)
    if command[:1] == ["tune"]:  # its flags are the daemon's, which only that knows
        _exec_tune(command[1:], runtime_dir)
    arguments = make_parser().parse_args(["version"] if given == ["--version"] else given)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except PageddError as error:
        print(f"pagectl: {printable(str(error))}", file=sys.stderr)
        return EXIT_STATUSES.get(error.code, EXIT_REFUSED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit, which would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _runtime_dir(given: list[str]) -> tuple[str | None, list[str]]:
    """What `--runtime-dir` says, and the rest of the command line."""
    parser = argparse.ArgumentParser(prog="pagectl", add_help=False, allow_abbrev=False)
    parser.add_argument("--runtime-dir")
    known, rest = parser.parse_known_args(given)
    return known.runtime_dir, rest


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagectl",
        description="Talk to the pagedd daemon of this machine.",
        epilog=EXIT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runtime-dir", metavar="DIR", help="folder of the daemon's sockets ($PAGEDD_RUNTIME_DIR)")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        subparser.set_defaults(run=run)
        return subparser

    generate = command("generate", run_generate, "continue a text")
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text; - or nothing reads standard input")
    _add_request_flags(generate)
    generate.add_argument("--n", type=int, default=1, metavar="N", help="answers; more than one is not streamed")
    generate.add_argument("--no-stream", action="store_true", help="print the answer when it is whole")
    generate.add_argument("--json", action="store_true", help="print one JSON object with texts, token ids and usage")

    chat = command("chat", run_chat, "hold a conversation; from a pipe, answer each line")
    chat.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    _add_request_flags(chat)

    command("ps", run_ps, "list the live requests")
    command("blocks", run_blocks, "draw the KV pool, one character a block")

    prefixes = command("prefixes", run_prefixes, "show what the prefix cache holds, as a tree")
    prefixes.add_argument("--limit", type=int, default=100, metavar="N", help="most rows (default %(default)s)")
    prefixes.add_argument("--json", action="store_true", help="as one JSON object")

    evict = command("evict", run_evict, "forget a prefix and all that continues it (needs the service owner's rights)")
    evict.add_argument("digest", metavar="DIGEST", help="as `pagectl prefixes` shows it")

    events = command("events", run_events, "list what happened lately and why")
    events.add_argument("--json", action="store_true", help="as one JSON array")

    stats = command("stats", run_stats, "print the daemon's figures")
    stats.add_argument("--json", action="store_true", help="as one JSON object, requests and block tables included")
    stats.add_argument("--watch", action="store_true", help="go on, as the daemon publishes")

    doctor = command("doctor", run_doctor, "say what should be changed, judging by the last minutes of work")
    doctor.add_argument("--json", action="store_true", help="as one JSON array")

    command("tune", run_tune, "try settings on the model and a load, and print what each is worth (tune --help)")

    usage = command("usage", run_usage, "list who has used how much, and what is left of their quotas")
    usage.add_argument("--json", action="store_true", help="as one JSON object, with costs")

    cost = command("cost", run_cost, "print the energy and the money that a token takes, now and since the start")
    cost.add_argument("--json", action="store_true", help="as one JSON object, with usage")

    cancel = command("cancel", run_cancel, "end a live request of anybody (needs the service owner's rights)")
    cancel.add_argument("request_id", metavar="ID", help="as `pagectl ps` shows it")

    command("sleep", run_sleep, "end the engine and give its memory back; a request wakes it (service owner's rights)")
    command("wake", run_wake, "start the engine again now (needs the service owner's rights)")
    priority = command(
        "priority", run_priority, "change how urgent a live request is (needs the service owner's rights)"
    )
    priority.add_argument("request_id", metavar="ID", help="as `pagectl ps` shows it")
    priority.add_argument("priority", type=int, metavar="N", help="-100 to 100, higher is more urgent")

    pull = command("pull", run_pull, "fetch a model into the cache and verify it")
    pull.add_argument("name", metavar="NAME", help="a known name, or a Hugging Face name")

    completion = command("completion", run_completion, "print what a shell reads to complete pagectl's line")
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")

    command("version", run_version, "print the versions of pagectl and of the daemon")
    return parser


def run_generate(arguments: argparse.Namespace) -> int:
    prompt = _prompt(arguments.prompt)
    is_streamed = not (arguments.no_stream or arguments.json or arguments.n != 1)
    with _asking_client(arguments) as client:
        generation = client.generate(prompt, model=arguments.model, priority=arguments.priority, **_sampling(arguments))
        if is_streamed:
            for delta in generation:
                _write(delta.text)
            _write("\n")
        done = generation.result()
    if arguments.json:
        print(_json(done))
    elif not is_streamed:
        for choice in done.choices:
            if len(done.choices) > 1:
                _write(f"--- {choice.index}\n")
            _write(f"{choice.text}\n")
    if any(choice.finish_reason == "abort" for choice in done.choices):
        # Or a script would take the part for the whole.
        print("pagectl: the request was cancelled; the answer is not whole", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def run_chat(arguments: argparse.Namespace) -> int:
    with _asking_client(arguments) as client:
        talk = conversation.Conversation(
            client,
            _write,
            system=arguments.system and _clean(arguments.system),
            model=arguments.model,
            priority=arguments.priority,
            sampling=_sampling(arguments),
        )
        if sys.stdin.isatty():
            conversation.talk_at_terminal(talk)
        else:
            conversation.talk_through_pipe(talk)
    return 0


def run_ps(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        _print_lines(render_requests(client.stats(), _glyphs()))
    return 0


def run_blocks(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        width = shutil.get_terminal_size((100, 24)).columns
        _print_lines(render_blocks(client.stats(blocks=True), _glyphs(), width))
    return 0


def run_stats(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        if not arguments.watch:
            _print_stats(client.stats(blocks=arguments.json), as_json=arguments.json)
            return 0
        is_redrawn = sys.stdout.isatty() and not arguments.json
        for frame in client.watch_stats():
            if is_redrawn:
                columns, lines = shutil.get_terminal_size()
                print(redrawn(render_figures(frame, _glyphs()), columns, lines), end="", flush=True)
            else:
                _print_stats(frame, as_json=arguments.json)
    return 0


def run_prefixes(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        tree = client.prefixes(arguments.limit)
    _print_lines([_json(tree)] if arguments.json else render_prefixes(tree, _glyphs()))
    return 0


def run_evict(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        evicted = client.evict_prefix(_clean(arguments.digest))
    print(f"{evicted.num_blocks} blocks are free, {evicted.num_kept} are in use and stay")
    return 0


def run_events(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        events = client.stats().events
    _print_lines([_json(events)] if arguments.json else render_events(events))
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        frame = client.stats()
    _print_lines([_json(frame.advice)] if arguments.json else [*render_advice(frame)])
    return 0


def run_tune(arguments: argparse.Namespace) -> int:
    _exec_tune([], arguments.runtime_dir)


def _exec_tune(flags: list[str], runtime_dir: str | None) -> NoReturn:
    _exec_pagedd(["tune", *flags, *([] if runtime_dir is None else ["--runtime-dir", runtime_dir])])


def run_usage(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        report = client.usage()
    _print_lines([_json(report)] if arguments.json else render_usage(report, _glyphs()))
    return 0


def run_cost(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        report = client.usage()
    _print_lines([_json(report)] if arguments.json else render_cost(report, _glyphs()))
    return 0


def run_cancel(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        client.cancel(_clean(arguments.request_id))
    return 0


def run_sleep(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        client.sleep()
    return 0


def run_wake(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        client.wake()
    return 0


def run_priority(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        client.set_priority(_clean(arguments.request_id), arguments.priority)
    return 0


def run_pull(arguments: argparse.Namespace) -> int:
    _exec_pagedd(["pull", arguments.name])


def _exec_pagedd(arguments: list[str]) -> NoReturn:
    """Another program, because a client knows nothing of models. `-P` keeps the working directory off sys.path."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "pagedd.daemon.cli", *arguments])


def run_completion(arguments: argparse.Namespace) -> int:
    print(completion_script(make_parser(), arguments.shell))
    return 0


def run_version(arguments: argparse.Namespace) -> int:
    print(f"pagectl {importlib.metadata.version('pagedd')}")
    endpoints = client_endpoints(arguments.runtime_dir)
    try:
        with Client(arguments.runtime_dir) as client:
            daemon = client.ping()
    except PageddError as error:
        print(f"pagedd  not running at {endpoints.directory} ({error.code})")
    else:
        print(f"pagedd  {daemon.version} ({daemon.state}) at {endpoints.directory}")
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
    parser.add_argument("--no-wait", action="store_true", help="fail at once while the daemon is loading its model")


def _asking_client(arguments: argparse.Namespace) -> Client:
    """Waits for a daemon that is loading its model, and says so."""

    def note() -> None:
        print("pagectl: the daemon is loading its model; waiting for it (--no-wait fails at once)", file=sys.stderr)

    return Client(arguments.runtime_dir, load_wait_s=0.0 if arguments.no_wait else LOAD_WAIT_S, on_load_wait=note)


def _sampling(arguments: argparse.Namespace) -> SamplingOptions:
    """What was given on the command line; the protocol has the defaults."""
    options = {flag.field: getattr(arguments, flag.field) for flag in SAMPLING_FLAGS}
    options["stop"] = None if arguments.stop is None else [_clean(stop) for stop in arguments.stop]
    # Only `generate` has it.
    options["n"] = getattr(arguments, "n", None)
    options["ignore_eos"] = arguments.ignore_eos or None
    return cast("SamplingOptions", {name: value for name, value in options.items() if value is not None})


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return _clean(argument)
    if argument is None and sys.stdin.isatty():
        raise PageddError("missing_field", "no prompt; give one, or - to type it on standard input", field="prompt")
    return sys.stdin.read()


def _clean(argument: str) -> str:
    """Bytes of the command line that are not UTF-8 come as lone surrogates, which no message can carry."""
    return os.fsencode(argument).decode("utf-8", "replace")


def _glyphs() -> Glyphs:
    return Glyphs.for_encoding(sys.stdout.encoding)


def _write(text: str) -> None:
    """To standard output at once; on a terminal without what could steer it."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _print_lines(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)


def _print_stats(frame: StatsFrame, as_json: bool) -> None:
    if as_json:
        print(_json(frame), flush=True)
    else:
        _print_lines(render_figures(frame, _glyphs()))


if __name__ == "__main__":
    sys.exit(main())
