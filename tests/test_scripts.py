"""`scripts/environment` where something is missing: one clear sentence, whatever pip printed before it.

The interpreter, pip and df are stand-ins, so nothing is fetched.
"""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("sh", "awk", "basename", "cat", "dirname", "grep", "mkdir", "mktemp", "rm", "sed")

# Stands in for the interpreter: makes "environments" that hold itself, and has pip do what PIP says.
FAKE_PYTHON = """\
#!/bin/sh
case "$*" in
    *"import sys"*) exit ${TOO_OLD:-0} ;;
    *"import venv"*) exit ${NO_VENV:-0} ;;
    --version) echo "Python 3.11.2" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"pip "*)
        echo "$*" >>"$PIP_LOG"
        echo "${PIP_SAYS:-}"
        case "$*" in ${PIP_LACKS:-nothing}) exit 1 ;; esac
        [ -z "${PIP_SAYS:-}" ]
        ;;
esac
"""


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A PATH with ordinary tools, a disk with room and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in (*TOOLS, "cp"):
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    program(folder / "df", 'echo header; echo "/dev/x 9 9 ${FREE_KB:-99999999} 9% /"')
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def make_environment(bin_folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    lock = bin_folder.parent / "requirements.lock"
    lock.write_text("# everything\nmsgspec==0.23.0\ntorch==2.13.0\n")
    return subprocess.run(
        [ROOT / "scripts" / "environment", bin_folder.parent / "env", lock],
        env={
            "PATH": str(bin_folder),
            "PIP_LOG": str(bin_folder.parent / "pip.log"),
            "NVIDIA_DEVICE": "/nonexistent",
            **environ,
        },
        capture_output=True,
        text=True,
    )


def pip_calls(bin_folder: Path) -> list[str]:
    return [line.partition(" install ")[2] for line in (bin_folder.parent / "pip.log").read_text().splitlines()]


CPU_BUILDS = "--no-deps --timeout 15 --retries 1 --index-url https://download.pytorch.org/whl/cpu torch==2.13.0"


@pytest.mark.parametrize(
    ("environ", "calls"),
    [
        ({}, ["--no-deps --no-index torch==2.13.0"]),
        ({"PIP_LACKS": "*--no-index*"}, ["--no-deps --no-index torch==2.13.0", CPU_BUILDS]),
        ({"PIP_LACKS": "*--no-deps*torch==*"}, ["--no-deps --no-index torch==2.13.0", CPU_BUILDS, "torch==2.13.0"]),
        ({"NVIDIA_DEVICE": "/"}, ["torch==2.13.0"]),
    ],
    ids=["a wheel at hand", "the index of CPU builds", "neither of them", "a GPU"],
)
def test_torch_comes_first_exactly_and_in_the_build_for_the_machine(
    bin_folder: Path, environ: dict[str, str], calls: list[str]
) -> None:
    program(bin_folder / "python3", FAKE_PYTHON)
    made = make_environment(bin_folder, **environ)
    assert made.returncode == 0, made.stderr
    assert pip_calls(bin_folder) == [*calls, f"--no-deps -r {bin_folder.parent / 'requirements.lock'}"]
    assert "installing 2 packages of requirements.lock" in made.stdout


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"TOO_OLD": "1"}, "Python 3.11 or newer is needed and was not found; install it"),
        ({"TOO_OLD": "1", "PYTHON": "python3"}, "python3 is not a Python of at least 3.11; set PYTHON to one that is."),
        ({"PYTHON": "python4"}, "python4 is not a Python of at least 3.11; set PYTHON to one that is."),
        ({"NO_VENV": "1"}, "python3 has no venv module; install it (Debian: apt install python3-venv)."),
        ({"FREE_KB": "102400"}, "has 100 MB free and the environment needs 2500 MB; make room."),
        ({"PIP_SAYS": "Max retries exceeded: NewConnectionError"}, "the package index cannot be reached; check the"),
        (
            {"PIP_SAYS": "OSError: [Errno 28] No space left on device"},
            "the disk is full; make room and run this again.",
        ),
        ({"PIP_SAYS": "ERROR: no wheel for this"}, "installing failed; the reason stands above."),
    ],
)
def test_what_is_missing_is_said_in_the_last_line(bin_folder: Path, environ: dict[str, str], sentence: str) -> None:
    program(bin_folder / "python3", FAKE_PYTHON)
    failed = make_environment(bin_folder, **environ)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("pagedd: ")
    assert sentence in failed.stderr.splitlines()[-1]
    assert environ.get("PIP_SAYS", "") in failed.stderr


def test_without_any_python_it_says_which_to_install(bin_folder: Path) -> None:
    assert "Python 3.11 or newer is needed" in make_environment(bin_folder).stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_is_named(bin_folder: Path) -> None:
    program(bin_folder / "python3", FAKE_PYTHON)
    bin_folder.parent.chmod(0o500)
    assert "cannot be written to" in make_environment(bin_folder).stderr


def test_bare_make_prints_every_target_with_a_sentence() -> None:
    shown = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, check=True
    )
    targets = [line.split()[1] for line in shown.stdout.splitlines()]
    setting_up = ["help", "kernels", "run", "test", "test-kernels", "kernels-aot", "lint", "format"]
    assert targets == [
        *setting_up,
        "bench",
        "bench-cases",
        "bench-peers",
        "soak",
        "fuzz",
        "screenshots",
        "install",
        "uninstall",
        "clean",
    ]
    assert all(len(line.split()) > 3 for line in shown.stdout.splitlines())
