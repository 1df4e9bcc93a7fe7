"""What is kept when an engine dies: a text file for whoever looks for the reason, and no prompt in it.

Owns the files, their folder and their number. A report that cannot be written is said in the log and stops nothing.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from pagedd.client.home import required_home
from pagedd.daemon.wall_clock import utc_now
from pagedd.engine.info import EngineInfo
from pagedd.engine.stats import EngineStats

log = logging.getLogger(__name__)

MAX_KEPT = 20
_REPORTS = "engine-*-*.txt"


@dataclass(frozen=True, slots=True)
class InFlight:
    """One request that the engine had."""

    request_id: str
    digest: bytes
    caller: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """`trace` is where the engine's threads were, empty when it could not say."""

    reason: str
    trace: str
    info: EngineInfo | None
    stats: EngineStats | None
    in_flight: tuple[InFlight, ...]

    def text(self, when: datetime) -> str:
        lines = [f"{when.isoformat(timespec='seconds')} {self.reason}"]
        lines += _section("engine", asdict(self.info) if self.info is not None else {})
        lines += _section("figures", asdict(self.stats) if self.stats is not None else {})
        lines += ["", f"requests in flight: {len(self.in_flight)}"]
        lines += [
            f"  {item.request_id} digest {item.digest.hex()} of {item.caller}: "
            f"{item.num_prompt_tokens} prompt tokens, {item.num_output_tokens} output tokens"
            for item in self.in_flight
        ]
        lines += ["", "trace:", self.trace.rstrip() or "  none"]
        return "\n".join(lines) + "\n"


def _section(title: str, figures: Mapping[str, object]) -> Iterable[str]:
    return ["", f"{title}:", *(f"  {name} = {value}" for name, value in figures.items())]


class CrashReports:
    """Reports in `folder`, which is made when the first is written; the oldest give way to new ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, crash: Crash) -> Path | None:
        """Where it is; None when it could not be written."""
        when = utc_now()
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Numbered, because the newest of all has the oldest time after a clock was set back.
            last = max(map(_number, self._folder.glob(_REPORTS)), default=0)
            path = self._folder / f"engine-{last + 1:06d}-{when:%Y%m%dT%H%M%S}Z.txt"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(crash.text(when))
            except OSError:
                path.unlink(missing_ok=True)  # an empty one would push one out that says something
                raise
            for old in sorted(self._folder.glob(_REPORTS), key=_number)[:-MAX_KEPT]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.warning("no crash report could be kept in %s: %s", self._folder, error)
            return None
        log.error("a crash report is in %s", path)
        return path


def _number(report: Path) -> int:
    return int(report.name.split("-")[1])


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """What outlives the daemon: `$STATE_DIRECTORY`, which systemd sets, else the user's own.

    Raises `PageddError("invalid_setting")` for a user without a home.
    """
    if given := environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return Path(given)
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else required_home(environ, "XDG_STATE_HOME") / ".local" / "state") / "pagedd"
