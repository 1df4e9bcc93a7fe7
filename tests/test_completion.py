"""Shell completion: what a real bash offers for the beginning of a command line."""

import argparse
import contextlib
import io
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedd.client import pagectl
from pagedd.client.completion import SHELLS, actions_of
from pagedd.daemon import cli, command_line
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.setting import settings_of
from pagedd.tui import app

# The parser of each program, and how it prints its completion.
PROGRAMS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[str], int]]] = {
    "pagedd": (command_line.make_parser, lambda shell: cli.main(["completion", shell])),
    "pagectl": (pagectl.make_parser, lambda shell: pagectl.main(["completion", shell])),
    "pagetop": (app.make_parser, lambda shell: app.main(["--completion", shell])),
}

# Does what bash does at Tab: the words so far are the arguments, the last one is to be completed.
ASK_BASH = """\
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p "$1" | sed 's/.* -F \\([^ ]*\\).*/\\1/')
"$function" "$1" "${COMP_WORDS[COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each program prints for each shell: `pagectl.bash`."""
    folder = tmp_path_factory.mktemp("completion")
    for program, (_, print_completion) in PROGRAMS.items():
        for shell in SHELLS:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                assert print_completion(shell) == 0
            (folder / f"{program}.{shell}").write_text(printed.getvalue())
    return folder


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("pagectl gen", ["generate"]),
        ("pagectl generate --max-", ["--max-tokens"]),
        ("pagectl completion ", ["bash", "fish", "zsh"]),
        ("pagedd check", ["check-config"]),
        ("pagedd --block-size ", ["16", "32", "8"]),
        ("pagedd --max-num-", ["--max-num-batched-tokens", "--max-num-seqs"]),
        ("pagedd --max-num-seqs 4 --log-level err", ["error"]),
        ("pagedd check-config --kv-cache-dtype int", ["int4", "int8"]),
        ("pagedd tune --use", ["--users"]),
        ("pagedd --api-key-file note", ["notes", "notes.txt"]),
        ("pagetop --runtime-dir note", ["notes"]),
        ("pagetop --theme li", ["light"]),
    ],
)
def test_bash_offers_what_may_come_next(scripts: Path, tmp_path: Path, line: str, offered: list[str]) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").touch()
    words = line.split(" ")
    said = subprocess.run(
        ["bash", "-c", ASK_BASH, "bash", scripts / f"{words[0]}.bash", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stderr == ""
    assert sorted(said.stdout.split()) == offered


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_one_that_its_shell_can_read_and_knows_every_flag(scripts: Path, program: str, shell: str) -> None:
    script = scripts / f"{program}.{shell}"
    flags = {flag for action in actions_of(PROGRAMS[program][0]()) for flag in action.option_strings}
    assert len(flags) > 8
    # fish takes a flag without its dashes.
    missing = [flag for flag in flags if flag.lstrip("-") not in script.read_text()]
    assert not missing
    if shutil.which(shell) is not None:
        read = subprocess.run([shell, "-n", script], capture_output=True, text=True)
        assert (read.returncode, read.stderr) == (0, "")


def test_the_parser_of_the_whole_command_line_has_all_that_the_command_takes() -> None:
    parser = command_line.make_parser()
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert flags >= {flag for setting in settings_of(DaemonConfig) for flag in setting.flags}
    (commands,) = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    assert list(commands) == list(cli.COMMANDS)


def test_a_shell_that_is_not_known_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == 78
    assert "it takes one of bash, zsh, fish" in capsys.readouterr().err
