"""Where the daemon's sockets are: one runtime directory, fixed names in it.

Owns the order in which the directory is chosen and the limit on a Unix socket's path. The daemon calls
`server_endpoints()` and binds there; a client calls `client_endpoints()`, which prefers a place where a socket exists.
Knows nothing of what is said over the sockets: that is `protocol.py`, and `aio.py` speaks it.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagedd.client.errors import PageddError
from pagedd.client.home import home_directory, required_home

SYSTEM_DIRECTORY = Path("/run/pagedd")

# Linux's sockaddr_un.sun_path holds 108 bytes, the last one NUL.
MAX_SOCKET_PATH_BYTES = 107
_LONGEST_NAME = "pagedd.sock"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The sockets of one runtime directory. Made by the functions below, which check the length of the paths."""

    directory: Path

    @property
    def requests(self) -> Path:
        """ZeroMQ ROUTER: generate, chat, cancel, and the tokens back."""
        return self.directory / "pagedd.sock"

    @property
    def stats(self) -> Path:
        """ZeroMQ PUB: one `StatsFrame` a message."""
        return self.directory / "stats.sock"

    @property
    def admin(self) -> Path:
        """ZeroMQ ROUTER for the service's owner and root: set_priority, cancel of any request."""
        return self.directory / "admin.sock"

    @property
    def http(self) -> Path:
        """HTTP/1.1: the OpenAI-compatible API, `/health`, `/metrics`."""
        return self.directory / "http.sock"

    @property
    def engine(self) -> Path:
        """ZeroMQ PAIR between the daemon's two processes. No client's business."""
        return self.directory / "engine.sock"


def ipc(path: Path) -> str:
    """A socket's path as the address that ZeroMQ takes."""
    return f"ipc://{path}"


def server_endpoints(directory: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Endpoints:
    """Where a daemon binds: `directory`, else `$PAGEDD_RUNTIME_DIR`, `$RUNTIME_DIRECTORY` (systemd sets it),
    `$XDG_RUNTIME_DIR/pagedd`, or `~/.cache/pagedd/run`. Creates nothing; see `create_directory`.

    Raises `PageddError("invalid_setting")` when the sockets' paths would be too long, and where none of these is given
    to a user without a home.
    """
    if directory is not None:
        return _checked(Path(directory))
    return _checked(_own_directory(environ))


def client_endpoints(
    directory: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
    system_directory: Path = SYSTEM_DIRECTORY,
) -> Endpoints:
    """Where a client looks: `directory` or `$PAGEDD_RUNTIME_DIR` as they are; else the first place with a socket in it.

    The places are `$RUNTIME_DIRECTORY`, `/run/pagedd`, `$XDG_RUNTIME_DIR/pagedd` and `~/.cache/pagedd/run`. A place
    that this user may not enter counts only when no other has a socket, so that the connection then fails with the
    true reason. With no socket anywhere it is the place where this user's own daemon would bind, if it could.

    Raises `PageddError("invalid_setting")` when the sockets' paths would be too long.
    """
    if directory is not None:
        return _checked(Path(directory))
    if named := environ.get("PAGEDD_RUNTIME_DIR"):
        return _checked(Path(named))
    closed: Path | None = None
    for place in (*_from_systemd(environ), system_directory, *_from_session(environ), *_from_home(environ)):
        try:
            # `Path.exists` would answer False for a directory that may not be entered.
            os.stat(place / "pagedd.sock")
        except PermissionError:
            closed = closed or place
        except OSError:
            continue
        else:
            return _checked(place)
    own = (*_from_systemd(environ), *_from_session(environ), *_from_home(environ), system_directory)
    return _checked(closed or own[0])


def create_directory(endpoints: Endpoints) -> None:
    """Makes the runtime directory, for its owner alone unless it exists with a wider mode.

    Raises `PageddError("invalid_setting")` when the directory belongs to another user, or when others may take files
    out of it: they could put a socket of their own in the daemon's place.
    """
    endpoints.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = endpoints.directory.stat()
    mode = status.st_mode
    if status.st_uid != os.geteuid() or mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not mode & stat.S_ISVTX):
        raise PageddError(
            "invalid_setting",
            f"runtime directory {endpoints.directory}: owner {status.st_uid}, mode {mode & 0o7777:04o}; it "
            f"must belong to user {os.geteuid()} and not be writable by others; chmod go-w, or set PAGEDD_RUNTIME_DIR",
            field="runtime_dir",
        )


def _own_directory(environ: Mapping[str, str]) -> Path:
    if named := environ.get("PAGEDD_RUNTIME_DIR"):
        return Path(named)
    if named_by_others := (*_from_systemd(environ), *_from_session(environ)):
        return named_by_others[0]
    return _below(required_home(environ, "XDG_RUNTIME_DIR, or PAGEDD_RUNTIME_DIR"))


def _from_systemd(environ: Mapping[str, str]) -> tuple[Path, ...]:
    # A unit may have several runtime directories, joined by colons; the first is the unit's own.
    first = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    return (Path(first),) if first else ()


def _from_session(environ: Mapping[str, str]) -> tuple[Path, ...]:
    # The XDG base directory specification has relative paths ignored.
    session = environ.get("XDG_RUNTIME_DIR", "")
    return (Path(session) / "pagedd",) if session.startswith("/") else ()


def _from_home(environ: Mapping[str, str]) -> tuple[Path, ...]:
    home = home_directory(environ)
    return () if home is None else (_below(home),)


def _below(home: Path) -> Path:
    # And not in /tmp, where another user could have made the directory first.
    return home / ".cache" / "pagedd" / "run"


def _checked(directory: Path) -> Endpoints:
    endpoints = Endpoints(directory.absolute())
    longest = os.fsencode(endpoints.directory / _LONGEST_NAME)
    if len(longest) > MAX_SOCKET_PATH_BYTES:
        raise PageddError(
            "invalid_setting",
            f"socket path {os.fsdecode(longest)!r}: {len(longest)} bytes, limit {MAX_SOCKET_PATH_BYTES}; "
            "set PAGEDD_RUNTIME_DIR to a shorter directory",
            field="runtime_dir",
        )
    return endpoints
