"""The `pagetop` command: flags, what kind of terminal this is, and which of the two ways to show things it can take.

Textual is imported only once there is a screen to draw.
"""

import argparse
import asyncio
import io
import os
import shutil
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pagedd.client.command_line import CommandLine
from pagedd.client.completion import SHELLS, completion_script
from pagedd.client.errors import PageddError
from pagedd.client.stats_frame import StatsFrame
from pagedd.tui.feed import LiveFeed, Source
from pagedd.tui.glyphs import glyphs_for
from pagedd.tui.line import printable
from pagedd.tui.recording import DEMO, Replay

if TYPE_CHECKING:
    from pagedd.tui.session import Session

THEMES = ("auto", "dark", "light", "contrast", "16", "none")
EXIT_REFUSED = 1
EXIT_INTERRUPTED = 130
_ONCE_WIDTH = 120
_PACE = "Draws four frames a second; one in two seconds while a model on the CPU keeps all cores busy."
# The figures that are rates need two frames that are some time apart.
_ONCE_S = 1.2
# What has come by then is what there is.
_PATIENCE_S = 15.0
_SLOWEST, _FASTEST = 0.01, 1000


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; the exit status."""
    for stream in (sys.stdout, sys.stderr):
        # Whatever the locale, what cannot be shown becomes `?` and not a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments = make_parser().parse_args(argv)
    try:
        if sys.stdout is None:
            raise PageddError("invalid_setting", "standard output is closed; let it be a terminal, a file or a pipe")
        if arguments.completion is not None:
            _print(completion_script(make_parser(), arguments.completion))
            return 0
        if arguments.once:
            return asyncio.run(_print_once(make_source(arguments), arguments))
        if reason := why_no_screen(arguments):
            print(f"pagetop: {reason}; this is pagetop --once", file=sys.stderr)
            return asyncio.run(_print_once(make_source(arguments), arguments))
        return _run_screen(arguments)
    except PageddError as error:
        print(f"pagetop: {printable(str(error))}", file=sys.stderr)
        return os.EX_UNAVAILABLE if error.code == "daemon_unreachable" else EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return 141


def make_parser() -> argparse.ArgumentParser:
    parser = CommandLine(prog="pagetop", description="Watch the pagedd daemon of this machine live.", epilog=_PACE)
    parser.add_argument("--runtime-dir", metavar="DIR", help="folder of the daemon's sockets ($PAGEDD_RUNTIME_DIR)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--demo", action="store_true", help="show a recorded session that comes with pagetop")
    shown.add_argument("--replay", metavar="FILE", type=Path, help="show a recorded session")
    parser.add_argument("--speed", type=_speed, default=1.0, metavar="X", help="of --replay and --demo (default 1)")
    parser.add_argument("--record", metavar="FILE", type=Path, help="record what comes into a new file")
    parser.add_argument("--once", action="store_true", help="print the picture as text and leave")
    parser.add_argument("--json", action="store_true", help="with --once: the frame as one JSON object")
    parser.add_argument("--theme", choices=THEMES, default="auto", help="colours (default %(default)s)")
    parser.add_argument("--ascii", action="store_true", help="no characters beyond ASCII")
    parser.add_argument("--completion", choices=SHELLS, help="print what a shell reads to complete pagetop's line")
    parser.add_argument("--version", action="version", version=f"pagetop {version('pagedd')}")
    return parser


def make_source(arguments: argparse.Namespace) -> Source:
    """What the flags ask to be shown. Raises `PageddError` for a file that is no recording."""
    if arguments.demo:
        return Replay(DEMO, speed=arguments.speed, is_loop=True, name="demo")
    if arguments.replay is not None:
        return Replay(arguments.replay, speed=arguments.speed)
    return LiveFeed(arguments.runtime_dir)


def why_no_screen(arguments: argparse.Namespace) -> str:
    """Why nothing can be drawn here; "" when it can."""
    if not all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stdin)):
        return "standard input or output is not a terminal"
    term = os.environ.get("TERM", "")
    return f"TERM={term or '(unset)'} cannot be drawn on" if term in ("", "dumb", "unknown") else ""


def _run_screen(arguments: argparse.Namespace) -> int:
    source = make_source(arguments)

    from pagedd.tui.pagetop import Pagetop
    from pagedd.tui.session import Session
    from pagedd.tui.themes import choose_theme

    theme = choose_theme(os.environ) if arguments.theme == "auto" else arguments.theme
    glyphs = glyphs_for(sys.stdout.encoding, ascii_only=arguments.ascii)
    session = Session(source)
    app = Pagetop(session, theme=theme, glyphs=glyphs)
    if arguments.record is not None:
        session.start_recording(arguments.record)
    app.run()
    _raise_fault(session)
    return app.return_code or 0


async def _print_once(source: Source, arguments: argparse.Namespace) -> int:
    from pagedd.tui.session import Session

    session = Session(source)
    try:
        if arguments.record is not None:
            session.start_recording(arguments.record)
        await _watch_shortly(session)
    finally:
        await session.close()
    frame = session.state.frame
    if frame is None:
        raise PageddError("daemon_unreachable", session.state.link.error or f"no picture came in {_PATIENCE_S:.0f} s")
    if arguments.json:
        import msgspec

        _print(msgspec.json.encode(frame).decode())
    else:
        from pagedd.tui.once import once_lines

        glyphs = glyphs_for(sys.stdout.encoding, ascii_only=arguments.ascii)
        width = shutil.get_terminal_size((_ONCE_WIDTH, 24)).columns
        _print("\n".join(once_lines(session.state, session.modes, width, glyphs)))
    _raise_fault(session)
    return 0


async def _watch_shortly(session: "Session") -> None:
    """Takes frames until the rates are known, the source says that there are none, or patience ends."""
    started_s: float | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            async for update in session.source.updates():
                session.take(update)
                if not isinstance(update, StatsFrame):
                    if update.state != "connecting":
                        return
                    continue
                now_s = time.monotonic()
                started_s = now_s if started_s is None else started_s
                if now_s - started_s >= _ONCE_S:
                    return


def _print(text: str) -> None:
    """Raises `PageddError("invalid_setting")` when standard output does not take it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _forget_output()
        raise PageddError("invalid_setting", f"standard output cannot be written ({error.strerror})") from error


def _forget_output() -> None:
    """Python flushes standard output once more at exit, which would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _raise_fault(session: "Session") -> None:
    """What ended the recording, if something did."""
    if (fault := session.take_fault()) is not None:
        raise fault


def _speed(text: str) -> float:
    speed = float(text)
    if not _SLOWEST <= speed <= _FASTEST:
        raise argparse.ArgumentTypeError(f"{text}: at least {_SLOWEST}, at most {_FASTEST}")
    return speed


if __name__ == "__main__":
    sys.exit(main())
