"""What each command of `pagectl` does, given its parsed flags; the exit status.

Owns what goes to which stream. What is asked is in `sync.py`, how answers look in `render.py`, the turns of a chat in
`conversation.py`; flags are `pagectl.py`'s.
"""

import argparse
import asyncio
import importlib.metadata
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import msgspec

from pagedd.client import conversation
from pagedd.client.aio import LOAD_WAIT_S, AsyncClient
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
from pagedd.client.replay import Replayed, replay
from pagedd.client.request_log import read_log
from pagedd.client.stats_frame import StatsFrame
from pagedd.client.sync import Client

EXIT_REFUSED = 1


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
        frame = client.stats(blocks=arguments.json)
    if arguments.json:
        print(_json(frame.requests))
    else:
        _print_picture(render_requests(frame, _glyphs()))
    return 0


def run_blocks(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        frame = client.stats(blocks=True)
    if arguments.json:
        print(_json(frame.blocks))
    else:
        _print_picture(render_blocks(frame, _glyphs(), shutil.get_terminal_size((100, 24)).columns))
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
    if evicted.num_beside_on_disk:
        print(f"the disk has lost {evicted.num_beside_on_disk} more, of other prefixes, that lay in the same files")
    if not evicted.num_left_on_disk:
        return 0
    print(
        f"{evicted.num_left_on_disk} lie in files on the disk that cannot be removed, and are back after a restart; "
        "the daemon's log has the reason: mend it, and evict once more",
        file=sys.stderr,
    )
    return EXIT_REFUSED


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
    exec_tune([], arguments.runtime_dir)


def exec_tune(flags: list[str], runtime_dir: str | None) -> NoReturn:
    _exec_pagedd(["tune", *flags, *([] if runtime_dir is None else ["--runtime-dir", runtime_dir])])


def run_replay(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.speed < math.inf:
        raise PageddError("invalid_value", f"speed = {arguments.speed:g}; it must be more than 0", field="speed")
    entries = read_log(Path(arguments.file), "file")

    async def send() -> Replayed:
        async with AsyncClient(arguments.runtime_dir) as client:
            return await replay(client, entries, arguments.speed)

    replayed = asyncio.run(send())
    _print_lines(replayed.lines())
    return EXIT_REFUSED if replayed.failures else 0


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
    _note(f"{arguments.request_id} is cancelled")
    return 0


def run_sleep(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        client.sleep()
    _note("the engine sleeps; a request or `pagectl wake` starts it again")
    return 0


def run_wake(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        client.wake()
    _note("the engine is starting, unless it was awake")
    return 0


def run_load(arguments: argparse.Namespace) -> int:
    # The daemon's working directory is another.
    model = os.path.abspath(arguments.model) if os.path.exists(arguments.model) else arguments.model
    with Client(arguments.runtime_dir) as client:
        client.load(_clean(model), arguments.name and _clean(arguments.name))
    _note(f"{arguments.model} is served")
    return 0


def run_priority(arguments: argparse.Namespace) -> int:
    with Client(arguments.runtime_dir) as client:
        client.set_priority(_clean(arguments.request_id), arguments.priority)
    _note(f"{arguments.request_id} has priority {arguments.priority}")
    return 0


def run_pull(arguments: argparse.Namespace) -> int:
    _exec_pagedd(["pull", arguments.name])


def _exec_pagedd(arguments: list[str]) -> NoReturn:
    """Another program, because a client knows nothing of models. `-P` keeps the working directory off sys.path."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "pagedd.daemon.cli", *arguments])


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


def _print_picture(lines: list[str]) -> None:
    """The first line is about the daemon: into a pipe goes what is asked for alone."""
    if sys.stdout.isatty():
        _print_lines(lines)
    else:
        print(lines[0], file=sys.stderr, flush=True)
        _print_lines(lines[1:])


def _note(line: str) -> None:
    """That a command without an answer has done its work, for a person; scripts have the status."""
    if sys.stderr.isatty():
        print(printable(line), file=sys.stderr)


def _print_stats(frame: StatsFrame, as_json: bool) -> None:
    if as_json:
        print(_json(frame), flush=True)
    else:
        _print_picture(render_figures(frame, _glyphs()))
