"""Reads the API keys that TCP clients must show: one a line; empty lines and lines that begin with # are skipped."""

from pathlib import Path

from pagedd.client.errors import PageddError

# Guessing over a loopback socket is quick; a shorter key is a typing mistake or a toy.
MIN_KEY_CHARS = 16


def read_api_keys(path: Path) -> list[str]:
    """Raises `PageddError("invalid_setting")` for a file that is unreadable, open to everyone, or without a usable key."""
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(path, str(error)) from error
    if mode & 0o007:
        raise _invalid(path, f"mode {mode & 0o777:04o} lets every user read or change it; chmod o= {path}")
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise _invalid(path, "it holds no key; write one a line, for example from openssl rand -hex 32")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise _invalid(
                path, f"key {number} is not at least {MIN_KEY_CHARS} printable ASCII characters without spaces"
            )
    return keys


def _invalid(path: Path, why: str) -> PageddError:
    return PageddError("invalid_setting", f"api_key_file = {path}: {why}", field="api_key_file")
