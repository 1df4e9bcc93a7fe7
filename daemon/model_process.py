"""Resolves a model in a process of its own, so that fetching and preparing never hold the event loop up.

    python -P -m pagedd.daemon.model_process NAME --parent PID

Owns that process: its start, its end with the front, and the lines of JSON that it answers in. What resolving means is
`models.py`'s. Preparing a large vocabulary holds Python's lock for seconds, which a thread would share with the loop.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from pagedd.client.errors import PageddError
from pagedd.daemon.parent import die_with_parent

log = logging.getLogger(__name__)


class Progress(msgspec.Struct, tag="progress"):
    line: str


class Resolved(msgspec.Struct, tag="resolved"):
    folder: str


class Unresolved(msgspec.Struct, tag="unresolved"):
    code: str
    message: str


_decoder: "msgspec.json.Decoder[Progress | Resolved | Unresolved]" = msgspec.json.Decoder(
    Progress | Resolved | Unresolved
)


async def resolve_in_child(name: str, report: Callable[[str], None]) -> Path:
    """`models.resolve_model(name)` in a child process. Cancelling ends the child and what it started.

    Raises `PageddError` like `resolve_model`, and `internal` when the child ends without an answer.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "pagedd.daemon.model_process",
        "--parent",
        str(os.getpid()),
        "--",
        name,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        # A group of its own, to end pip together with the child that runs it.
        start_new_session=True,
    )
    assert process.stdout is not None  # a pipe was asked for
    try:
        async for line in process.stdout:
            match _decoder.decode(line):
                case Progress(line=text):
                    report(text)
                case Resolved(folder=folder):
                    return Path(folder)
                case Unresolved(code=code, message=message):
                    raise PageddError(code, message)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = await process.wait()
    raise PageddError("internal", f"the process that prepares {name} ended with status {status}; its log is above")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Started by pagedd; people use `pagedd prepare`.")
    parser.add_argument("name")
    parser.add_argument("--parent", required=True, type=int)
    options = parser.parse_args(argv)
    die_with_parent(options.parent)
    from pagedd.daemon.models import resolve_model

    try:
        folder = resolve_model(options.name, report=lambda line: _say(Progress(line)))
    except PageddError as error:
        _say(Unresolved(error.code, error.message))
    else:
        _say(Resolved(str(folder)))
    return 0


def _say(message: Progress | Resolved | Unresolved) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
