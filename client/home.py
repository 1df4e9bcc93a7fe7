"""The user's home directory, which users of containers may not have."""

import os
from collections.abc import Mapping
from pathlib import Path

from pagedd.client.errors import PageddError


def home_directory(environ: Mapping[str, str]) -> Path | None:
    """`$HOME`, else what the table of users says; None for a user that it does not know."""
    if home := environ.get("HOME"):
        return Path(home)
    try:
        return Path.home()
    except RuntimeError:
        return None


def required_home(environ: Mapping[str, str], instead: str) -> Path:
    """As above. `instead` is what would do without it. Raises `PageddError("invalid_setting")` where there is none."""
    home = home_directory(environ)
    if home is None:
        raise PageddError("invalid_setting", f"user {os.geteuid()} has no home directory; set HOME, or {instead}")
    return home
