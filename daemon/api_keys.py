"""The keys that TCP clients show, and the names that stand for them in logs, statistics and quotas.

The file may hold a key's SHA-256 instead of the key, and then whoever reads the file cannot use it. Without salt and
rounds, because a key is drawn, not thought of: `hash_line` refuses what could be guessed.
"""

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagedd.client.errors import PageddError
from pagedd.client.nearest import did_you_mean
from pagedd.daemon.files import read_regular, reason

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
# 96 bits, if each character is a hexadecimal digit.
_MIN_KEY_CHARS = 24
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`name` is the file's, else a digest's beginning, which does not give the key away. Several keys may share one.

    `digest` is the key's SHA-256. `is_admin`: it may do what root may over the HTTP socket.
    """

    digest: bytes = field(repr=False)
    name: str
    is_admin: bool = False


def configured_keys(path: Path | None, names_with_quota: Iterable[str]) -> list[ApiKey]:
    """Those of `api_key_file` at the start. Raises `PageddError("invalid_setting")`, also for a quota without a key."""
    keys = [] if path is None else read_api_keys(path)
    check_names(names_with_quota, keys)
    return keys


def reread_keys(path: Path | None, names_with_quota: Iterable[str]) -> list[ApiKey]:
    """Those of `api_key_file` as it is now. Raises `PageddError("invalid_setting")`.

    A quota without a key is only said in the log: no such thing may keep a key that was taken out of the file.
    """
    keys = [] if path is None else read_api_keys(path)
    try:
        check_names(names_with_quota, keys)
    except PageddError as error:
        log.warning("%s", error)
    return keys


def read_api_keys(path: Path) -> list[ApiKey]:
    """`KEY`, `NAME KEY` or `NAME KEY admin`, one a line; KEY is the key, or `sha256:` and its digest in hexadecimal.

    Blank lines and those that begin with # are left out. The log warns of keys that are not hashed, and of a file that
    others may read or change. Raises `PageddError("invalid_setting")`.
    """
    try:
        content, status = read_regular(path, _MAX_FILE_BYTES)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(f"api_key_file {path}: {reason(error)}") from error
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), 1)}
    lines = {number: line for number, line in lines.items() if line and not line.startswith("#")}
    keys = [_key(f"api_key_file {path}, line {number}", line) for number, line in lines.items()]
    if not keys:
        raise _invalid(f"api_key_file {path} holds no key; write one a line")
    if num_plain := sum(_HASHED.search(line) is None for line in lines.values()):
        log.warning("%s holds %d keys that are not hashed; `pagedd hash-key` makes the line to write", path, num_plain)
    _warn_of_others(path, status.st_mode, has_plain=num_plain > 0)
    return keys


def find_key(keys: Iterable[ApiKey], shown: str) -> ApiKey | None:
    """The first of `keys` that is `shown`. All are compared, in a time that does not tell which one is near."""
    digest = _sha256(shown)
    matching = [key for key in keys if hmac.compare_digest(key.digest, digest)]
    return matching[0] if matching else None


def hash_line(key: str, *words: str) -> str:
    """The line for `key` in the file, `words` being name and scope. Raises `PageddError("invalid_setting")`."""
    if len(key) < _MIN_KEY_CHARS or key != "".join(key.split()):
        raise _invalid(
            f"a key of {len(key)} characters: it has at least {_MIN_KEY_CHARS} and no blank; `openssl rand -hex 24` "
            "makes one"
        )
    check_words(words)
    return " ".join((*words[:1], f"sha256:{_sha256(key).hex()}", *words[1:]))


def check_words(words: Sequence[str]) -> None:
    """Name and scope as `hash_line` takes them. Raises `PageddError("invalid_setting")`."""
    if words and not _NAME.fullmatch(words[0]):
        raise _invalid(f"the key's name {words[0]!r}: it has 1 to 64 letters, digits or _.-")
    if len(words) > 1 and list(words[1:]) != ["admin"]:
        raise _invalid(f"after the key's name {' '.join(words[1:])!r}: there comes nothing, or admin")


def check_names(names: Iterable[str], keys: Iterable[ApiKey]) -> None:
    """Raises `PageddError("invalid_setting")` for a quota of a key that is not there."""
    known = [key.name for key in keys]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, "name it there: NAME KEY")
            raise PageddError(
                "invalid_setting", f"quota.key.{name}: api_key_file has no key of that name; {hint}", field="quota"
            )


def _warn_of_others(path: Path, mode: int, *, has_plain: bool) -> None:
    """Whoever writes to the file can make a key of his own, whoever reads one in clear has it."""
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        log.warning("%s has mode %04o: others can write keys of their own into it; chmod go-w", path, mode & 0o7777)
    if has_plain and mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s has mode %04o: others can read the keys in it; chmod go-r", path, mode & 0o7777)


def _key(where: str, line: str) -> ApiKey:
    names: list[str] = []
    scopes: list[str] = []
    match line.split():
        case [shown]:
            pass
        case [name, shown, *scopes]:
            names = [name]
    if scopes not in ([], ["admin"]) or not all(_NAME.fullmatch(name) for name in names):
        raise _invalid(f"{where}: it is KEY, NAME KEY or NAME KEY admin, a name 1 to 64 letters, digits or _.-")
    hashed = _HASHED.fullmatch(shown)
    if hashed is None and shown.startswith("sha256:"):
        raise _invalid(f"{where}: after sha256: come 64 hexadecimal digits; `pagedd hash-key` makes the line")
    digest = bytes.fromhex(hashed[1]) if hashed is not None else _sha256(shown)
    return ApiKey(digest, names[0] if names else digest.hex()[:12], is_admin=bool(scopes))


def _sha256(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _invalid(message: str) -> PageddError:
    return PageddError("invalid_setting", message, field="api_key_file")
