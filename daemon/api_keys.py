"""The keys that TCP clients show, and the names that stand for them in logs, statistics and quotas."""

import difflib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pagedd.client.errors import PageddError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`name` is the file's, else a digest's beginning, which does not give the key away. Several keys may share one."""

    secret: bytes = field(repr=False)
    name: str


def read_api_keys(path: Path) -> list[ApiKey]:
    """`KEY` or `NAME KEY`, one a line; blank lines and those that begin with # are left out.

    Raises `PageddError("invalid_setting")`.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(f"api_key_file {path}: {error}") from error
    keys = [_key(path, number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if not keys:
        raise _invalid(f"api_key_file {path} holds no key; write one a line")
    return keys


def check_names(names: Iterable[str], keys: Iterable[ApiKey]) -> None:
    """Raises `PageddError("invalid_setting")` for a quota of a key that is not there."""
    known = [key.name for key in keys]
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"did you mean {nearest[0]}?" if nearest else "name it there: NAME KEY"
            raise PageddError(
                "invalid_setting", f"quota.key.{name}: api_key_file has no key of that name; {hint}", field="quota"
            )


def _key(path: Path, number: int, line: str) -> ApiKey:
    *names, secret = line.split()
    if len(names) > 1 or not all(_NAME.fullmatch(name) for name in names):
        raise _invalid(
            f"api_key_file {path}, line {number}: it is KEY or NAME KEY, a name 1 to 64 letters, digits or _.-"
        )
    return ApiKey(secret.encode(), names[0] if names else hashlib.sha256(secret.encode()).hexdigest()[:12])


def _invalid(message: str) -> PageddError:
    return PageddError("invalid_setting", message, field="api_key_file")
