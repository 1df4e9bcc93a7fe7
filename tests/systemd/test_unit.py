"""The files that are installed, without booting anything."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pagedd.daemon.cli import EXIT_STATUSES
from pagedd.daemon.config import load_config

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "systemd" / "pagedd.service").read_text()


def test_the_default_settings_file_is_what_the_declarations_make() -> None:
    default_config = runpy.run_path(str(ROOT / "scripts" / "default_config.py"))["default_config"]
    made = "run: python -P scripts/default_config.py > systemd/pagedd.toml"
    assert (ROOT / "systemd" / "pagedd.toml").read_text() == default_config(), made


def test_every_key_of_the_default_settings_file_is_accepted_as_it_stands(tmp_path: Path) -> None:
    text = re.sub(r"^#(\w+ = )", r"\1", (ROOT / "systemd" / "pagedd.toml").read_text(), flags=re.M)
    assert len(tomllib.loads(text)) > 10
    file = tmp_path / "pagedd.toml"
    file.write_text(text)
    assert load_config([], {}, file).config == load_config([], {}, tmp_path / "absent.toml").config


def test_the_unit_does_not_restart_what_waiting_cannot_mend() -> None:
    listed = re.search(r"^RestartPreventExitStatus=(.*)$", UNIT, re.M)
    assert listed is not None
    for code in (
        "invalid_setting",
        "unknown_setting",
        "unsupported_model",
        "poor_kv_quality",
        "already_running",
        "checksum_mismatch",
    ):
        assert str(EXIT_STATUSES[code]) in listed[1].split()


def analyze(tmp_path: Path, *arguments: str, unit: str = "pagedd.service", is_for_gpu: bool = False) -> str:
    """What `systemd-analyze` says of a unit, which must not be an error."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for source in (ROOT / "systemd" / unit, ROOT / "systemd" / "pagedd.socket", ROOT / "systemd" / "pagedd.service"):
        # The program has to exist for it.
        (tmp_path / source.name).write_text(source.read_text().replace("/opt/pagedd/bin/pagedd", "/bin/true"))
    if is_for_gpu:
        (tmp_path / "pagedd.service.d").mkdir()
        shutil.copy(ROOT / "systemd" / "gpu.conf", tmp_path / "pagedd.service.d")
    said = subprocess.run(
        ["systemd-analyze", *arguments, str(tmp_path / unit)],
        capture_output=True,
        text=True,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert (said.returncode, said.stderr) == (0, "")
    return said.stdout


@pytest.mark.parametrize("unit", ["pagedd.service", "pagedd.socket"])
def test_systemd_finds_no_fault_in_a_unit(tmp_path: Path, unit: str) -> None:
    analyze(tmp_path, "verify", unit=unit)


def test_systemd_finds_no_fault_in_the_users_unit(tmp_path: Path) -> None:
    analyze(tmp_path, "verify", "--user", unit="pagedd-user.service")


def test_systemd_finds_no_fault_in_the_unit_for_a_gpu(tmp_path: Path) -> None:
    analyze(tmp_path, "verify", is_for_gpu=True)


@pytest.mark.parametrize(("is_for_gpu", "most"), [(False, 1.5), (True, 2.0)])
def test_little_is_exposed(tmp_path: Path, is_for_gpu: bool, most: float) -> None:
    said = analyze(tmp_path, "security", "--offline=true", "--no-pager", is_for_gpu=is_for_gpu)
    overall = re.search(r"Overall exposure level for pagedd\.service: ([\d.]+)", said)
    assert overall is not None
    assert float(overall[1]) <= most


def test_the_users_unit_gives_up_where_the_machines_does() -> None:
    def line(unit: str) -> str:
        return next(line for line in unit.splitlines() if line.startswith("RestartPreventExitStatus="))

    assert line((ROOT / "systemd" / "pagedd-user.service").read_text()) == line(UNIT)


def test_install_below_a_destdir_touches_nothing_else_and_uninstall_removes_it(tmp_path: Path) -> None:
    environ = {"DESTDIR": str(tmp_path), "INSTALL_VENV": sys.prefix, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    environ["PREFIX"] = "/usr/lib/pagedd"
    subprocess.run([ROOT / "scripts" / "install"], env=environ, check=True)
    assert (tmp_path / "usr/local/bin/pagectl").readlink() == Path("/usr/lib/pagedd/bin/pagectl")
    assert (tmp_path / "usr/lib/pagedd/bin/pagectl").read_text().startswith("#!/usr/lib/pagedd/bin/python")
    installed = (tmp_path / "usr/local/lib/systemd/system/pagedd.service").read_text()
    assert "ExecStart=/usr/lib/pagedd/bin/pagedd\n" in installed
    packages = next((tmp_path / "usr/lib/pagedd/lib").glob("python3*/site-packages/pagedd"))
    assert {folder.name for folder in packages.iterdir()} >= {"client", "daemon", "engine", "kernels", "tui"}
    below_root = [path for path in (tmp_path / "usr/lib/pagedd").rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in below_root if str(tmp_path).encode() in path.read_bytes()] == []
    [compiled] = (packages / "daemon" / "__pycache__").glob("cli.*.pyc")
    assert (
        str(Path("/usr/lib/pagedd") / packages.relative_to(tmp_path / "usr/lib/pagedd")).encode()
        in compiled.read_bytes()
    )

    share = tmp_path / "usr/local/share"
    assert "complete " in (share / "bash-completion/completions/pagectl").read_text()
    assert (share / "zsh/site-functions/_pagetop").read_text().startswith("#compdef pagetop")
    assert "complete -c pagedd" in (share / "fish/vendor_completions.d/pagedd.fish").read_text()
    assert (share / "man/man8/pagedd.8").read_text().startswith('.TH "PAGEDD" 8')

    settings = tmp_path / "etc/pagedd/pagedd.toml"
    settings.write_text("block_size = 8\n")
    subprocess.run([ROOT / "scripts" / "install"], env=environ, check=True)
    assert settings.read_text() == "block_size = 8\n"

    subprocess.run([ROOT / "scripts" / "uninstall"], env=environ, check=True)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()] == ["pagedd.toml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["etc"], "no empty folder stays"


def test_uninstall_removes_no_folder_that_is_not_an_installed_pagedd(tmp_path: Path) -> None:
    (tmp_path / "opt").mkdir()
    environ = {"DESTDIR": str(tmp_path), "PREFIX": "/opt", "PATH": "/usr/bin:/bin"}
    refused = subprocess.run([ROOT / "scripts" / "uninstall"], env=environ, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "is not an installed pagedd; nothing was removed" in refused.stderr
    assert (tmp_path / "opt").is_dir()
