"""The manual pages say what the parsers and the settings say, and roff has nothing to complain of."""

import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pagedd.client import pagectl
from pagedd.client.completion import actions_of
from pagedd.daemon import cli, command_line
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.setting import settings_of
from pagedd.tui import app

# What groff makes of a hyphen, a minus and an apostrophe.
TYPESET = {0x2010: "-", 0x2212: "-", 0x2019: "'"}
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def manual() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "manual.py"))


@pytest.fixture(scope="module")
def shown(manual: dict[str, Any]) -> dict[str, str]:
    """Each page as people read it, every run of white space one space."""
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    read = {}
    for name, text in manual["pages"]().items():
        # As wide as the longest paragraph, so that nothing is hyphenated.
        command = ["groff", "-man", "-Tutf8", "-P-cbou", "-ww", "-rLL=4000n", "-rHY=0"]
        made = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
        assert made.stderr == "", name
        read[name] = " ".join(made.stdout.translate(TYPESET).split())
    return read


def test_there_is_a_page_for_each_program_and_for_the_settings_file(manual: dict[str, Any], tmp_path: Path) -> None:
    manual["write"](tmp_path)
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert written == ["man1/pagectl.1", "man1/pagetop.1", "man5/pagedd.toml.5", "man8/pagedd.8"]


@pytest.mark.parametrize(
    ("page", "parser"),
    [
        ("pagectl.1", pagectl.make_parser()),
        ("pagetop.1", app.make_parser()),
        ("pagedd.8", command_line.make_parser()),
    ],
    ids=["pagectl", "pagetop", "pagedd"],
)
def test_a_page_has_every_flag_of_its_program_with_its_help(shown: dict[str, str], page: str, parser: Any) -> None:
    for action in actions_of(parser):
        for flag in action.option_strings:
            assert f" {flag}" in shown[page]
        if action.option_strings and "%" not in action.help:
            assert " ".join(action.help.split()) in shown[page]


def test_the_settings_page_has_every_key_with_its_meaning_and_default(shown: dict[str, str]) -> None:
    for setting in settings_of(DaemonConfig):
        assert f"{setting.key} = {setting.toml(setting.default)} {setting.help}" in shown["pagedd.toml.5"]
        assert setting.variable in shown["pagedd.toml.5"]


def test_the_daemons_page_has_its_commands_and_exit_statuses(shown: dict[str, str]) -> None:
    page = shown["pagedd.8"]
    for name, command in cli.COMMANDS.items():
        assert re.search(rf" {name} (\[\w+( \.\.\.)?\] |bash\S+ )*{re.escape(command.help)}\.", page), name
    for code, status in cli.EXIT_STATUSES.items():
        assert re.search(rf" {status} [^=]*{code}: ", page), code
