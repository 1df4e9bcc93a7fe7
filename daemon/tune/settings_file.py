"""Changes some keys of a settings file and leaves the rest of it, comments and all, as its owner wrote it."""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedd.client.errors import PageddError


def merge(text: str, changes: Mapping[str, Any]) -> str:
    """`text` with `changes`: each key in place of its line, or of the comment that shows it, else before any table."""
    lines = text.splitlines()
    for key, value in changes.items():
        end = next((number for number, line in enumerate(lines) if line.startswith("[")), len(lines))
        written = f"{key} = {_toml(value)}"
        for pattern in (rf"{key}\s*=", rf"#\s*{key}\s*="):
            found = next((number for number in range(end) if re.match(pattern, lines[number])), None)
            if found is not None:
                lines[found] = written
                break
        else:
            lines.insert(end, written)
    return "\n".join(lines) + "\n"


def refuse_unwritable(path: Path) -> None:
    """Says before minutes of trials what `write_settings` would say after them."""
    if not os.access(path.parent, os.W_OK | os.X_OK):
        reason = "no such directory" if not path.parent.is_dir() else "its directory is not yours to write in"
        raise PageddError("invalid_setting", f"{path} cannot be written: {reason}", field="out")


def write_settings(path: Path, text: str) -> None:
    """The whole text or nothing, with the mode of the file that was there. Raises `PageddError("invalid_setting")`."""
    unfinished: Path | None = None
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            unfinished = Path(file.name)
            file.write(text)
            os.fchmod(file.fileno(), mode)
        unfinished.replace(path)
    except OSError as error:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        raise PageddError("invalid_setting", f"{path} cannot be written: {error.strerror}", field="out") from error


def _toml(value: Any) -> str:
    """A bool, a number or a text, which TOML writes as JSON does."""
    return json.dumps(value)
