"""Prints `systemd/pagedd.toml`, the default settings file, from the declarations in `daemon/config.py`.

    python -P scripts/default_config.py > systemd/pagedd.toml

A test holds the file to what this prints.
"""

import textwrap

from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.setting import Setting, Table, settings_of, tables_of

HEADER = """\
# Settings of the pagedd service. Every key is here, with its default; uncomment what you change, then
#   pagedd check-config && systemctl restart pagedd
# Flags and PAGEDD_... variables come before this file. An unknown key is an error that names the nearest one.
"""


def default_config() -> str:
    settings = settings_of(DaemonConfig)
    parts = [HEADER, *(_entry(item) for item in settings if not item.table)]
    for table in tables_of(DaemonConfig).values():
        parts.append(f"[{table.name}]\n")
        parts += [_entry(item) for item in settings if item.table == table.name]
        parts += _subtables(table)
    return "\n".join(parts)


def _entry(item: Setting) -> str:
    sentences = [item.help]
    if allowed := item.allowed_in_toml:
        sentences.append(f"{allowed[0].upper()}{allowed[1:]}.")
    if item.none_means:
        sentences.append(f'"{item.none}" is {item.none_means}.')
    return f"{_comment(' '.join(sentences))}\n#{item.key} = {item.toml(item.default)}\n"


def _subtables(table: Table) -> list[str]:
    return [f"{_comment(text)}\n#[{table.name}.{kind}.NAME]\n" for kind, text in table.helps.items()]


def _comment(text: str) -> str:
    return textwrap.fill(text, width=110, initial_indent="# ", subsequent_indent="# ")


if __name__ == "__main__":
    print(default_config(), end="")
