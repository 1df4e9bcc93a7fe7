"""Prints `systemd/pagedd.toml`, the default settings file, from the declarations in `daemon/config.py`.

    python -P scripts/default_config.py > systemd/pagedd.toml

A test holds the file to what this prints.
"""

import json
import textwrap
from typing import Any

from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.settings import Setting, settings_of

HEADER = """\
# Settings of the pagedd service. Every key is here, with its default; uncomment what you change, then
#   pagedd check-config && systemctl restart pagedd
# Flags and PAGEDD_... variables come before this file. An unknown key is an error that names the nearest one.
"""


def default_config() -> str:
    return "\n".join([HEADER, *(f"{_entry(item)}\n" for item in settings_of(DaemonConfig))])


def _entry(item: Setting) -> str:
    sentences = [item.help]
    if item.allowed:
        sentences.append(f"{item.allowed[0].upper()}{item.allowed[1:]}.")
    if item.none_means:
        sentences.append(f'"{item.none}" is {item.none_means}.')
    comment = textwrap.fill(" ".join(sentences), width=110, initial_indent="# ", subsequent_indent="# ")
    return f"{comment}\n#{item.name} = {_toml(item, item.default)}"


def _toml(item: Setting, value: Any) -> str:
    if value is None:
        return f'"{item.none}"'
    # JSON's strings, numbers and booleans are TOML's.
    return json.dumps(value) if isinstance(value, (bool, int, float)) else json.dumps(str(value))


if __name__ == "__main__":
    print(default_config(), end="")
