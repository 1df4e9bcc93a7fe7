"""Changes some keys of a settings file and leaves the rest of it, comments and all, as its owner wrote it.

No parser of its own: it tries the places where a key may stand, and takes the first after which Python's TOML reader
reads what was there before and the new value, nothing else. So a table, a list or a text over many lines is never cut.
"""

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pagedd.client.errors import PageddError

# The value of `key = value  # why`: what is kept follows it.
_VALUE = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^#"']*?)"""


def merge(text: str, changes: Mapping[str, Any]) -> str:
    """`text` with `changes`: each key in place of its line, or of the comment that shows it, else before any table.

    Raises `PageddError("invalid_setting")` when `text` is no TOML, or has a key where it cannot be changed safely.
    """
    for key, value in changes.items():
        wanted = {**_read(text), key: value}
        found = next((merged for merged in _places(text, key, value) if _reads_as(merged, wanted)), None)
        if found is None:
            raise PageddError("invalid_setting", f"{key} is written in a way that cannot be changed here", field=key)
        text = found
    return text


def read_settings(path: Path) -> str:
    """The text of the file, empty when there is none. Raises `PageddError("invalid_setting")`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PageddError("invalid_setting", f"{path} cannot be read: {reason}", field="settings_file") from None


def refuse_unwritable(path: Path, field: str) -> None:
    """Says before minutes of trials what `write_settings` would say after them, by doing all of it but the last."""
    with _successor(path, field):
        pass


def write_settings(path: Path, text: str, field: str) -> None:
    """The whole text or nothing, in the file that `path` leads to, with the owner and mode that it had.

    Raises `PageddError("invalid_setting")`, which blames the flag `field`.
    """
    with _successor(path, field) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        os.replace(file.name, os.path.realpath(path))


@contextmanager
def _successor(path: Path, field: str) -> Iterator[IO[str]]:
    """A file beside the one that `path` leads to, which may take its place; it is gone afterwards unless it did."""
    target = Path(os.path.realpath(path))
    name = None
    try:
        if not target.parent.is_dir():
            raise PageddError("invalid_setting", f"{path} cannot be written: no such directory", field=field)
        if target.exists() and not target.is_file():
            raise PageddError("invalid_setting", f"{path} cannot be written: it is no plain file", field=field)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="", dir=target.parent, delete=False) as file:
            name = file.name
            if target.exists():
                before = target.stat()
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), before.st_mode & 0o777)
            else:
                os.fchmod(file.fileno(), 0o644)
            yield file
    except OSError as error:
        raise PageddError("invalid_setting", f"{path} cannot be written: {error.strerror}", field=field) from error
    finally:
        if name is not None:
            Path(name).unlink(missing_ok=True)


def _places(text: str, key: str, value: Any) -> Iterator[str]:
    """`text` with the key in each place where it may belong, the best first."""
    written = f"{key} = {json.dumps(value)}"  # a bool, a number or a text, which TOML writes as JSON does
    lines = text.splitlines(keepends=True)
    line_end = "\r\n" if "\r\n" in text else "\n"
    spelled = rf"""(?:{key}|"{key}"|'{key}')"""
    for begin in (rf"\s*{spelled}", rf"\s*#\s*{spelled}"):
        line_of_key = re.compile(rf"{begin}\s*=\s*{_VALUE}(?P<rest>\s*(?:#.*)?)", re.DOTALL)
        for number, line in enumerate(lines):
            found = line_of_key.fullmatch(line)
            # A sentence about the key is not the key in a comment.
            if found and _is_toml(line.lstrip("# \t")):
                yield "".join([*lines[:number], written + found["rest"], *lines[number + 1 :]])
    for number, line in enumerate(lines):
        if line.lstrip().startswith("["):
            yield "".join([*lines[:number], written + line_end, *lines[number:]])
    yield text + ("" if not text or text.endswith("\n") else line_end) + written + line_end


def _read(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # no TOML, a number of too many digits, tables without end
        raise PageddError("invalid_setting", f"the settings file is no TOML: {error}", field="settings_file") from None


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _reads_as(text: str, wanted: dict[str, Any]) -> bool:
    try:
        return tomllib.loads(text) == wanted
    except (ValueError, RecursionError):
        return False
