"""Building the C++ kernels: what an earlier build has left does not stop the next one. Nothing is compiled here."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils import cpp_extension

from pagedd.kernels import cpu
from pagedd.kernels.cpu import build


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build folder, with a compiler that is always there, and builds in this process."""
    made = tmp_path / "kernels"
    monkeypatch.setattr(cpu, "_build_folder", lambda: made)
    monkeypatch.setattr(cpu, "load", functools.cache(cpu.load.__wrapped__))
    monkeypatch.setattr(build, "build_in_child", build.build)
    monkeypatch.setattr(cpu, "_import", lambda library: ModuleType(library.stem))
    monkeypatch.setenv("CXX", "true")
    return made


def fake_torch_load(name: str, sources: list[str], *, build_directory: str, **options: Any) -> ModuleType:
    """As torch's: it waits for ever while its lock file is there."""
    made = Path(build_directory)
    assert not (made / "lock").exists()
    (made / f"{name}.so").write_bytes(b"built")
    return ModuleType(name)


def test_a_killed_build_does_not_make_the_next_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "load", fake_torch_load)
    for left in (folder, folder / "build-old"):
        left.mkdir()
        (left / "lock").touch()
    assert cpu.load().__name__ == "pagedd_cpu"
    assert (folder / "pagedd_cpu.so").read_bytes() == b"built"
    assert not list(folder.glob("build-*"))


def test_a_build_that_fails_says_why_and_leaves_nothing_to_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("error: expected ;")

    monkeypatch.setattr(cpp_extension, "load", fail)
    with pytest.raises(cpu.KernelsUnavailableError, match="expected ;"):
        cpu.load()
    assert not (folder / "pagedd_cpu.so").exists()
    assert not list(folder.glob("build-*"))


@pytest.mark.parametrize("torn", [b"", b"bui", bytes(5)])
def test_a_library_that_is_not_as_it_was_built_is_built_anew_and_never_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    imported: list[bytes] = []

    def read(library: Path) -> ModuleType:
        imported.append(library.read_bytes())
        return ModuleType(library.stem)

    monkeypatch.setattr(cpp_extension, "load", fake_torch_load)
    monkeypatch.setattr(cpu, "_import", read)
    cpu.load()
    (folder / "pagedd_cpu.so").write_bytes(torn)
    cpu.load.cache_clear()
    cpu.load()
    assert imported == [b"built", b"built"]


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cpu, "load", functools.cache(cpu.load.__wrapped__))
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(cpu.KernelsUnavailableError, match="set CACHE_DIRECTORY or XDG_CACHE_HOME"):
        cpu.load()


@pytest.mark.parametrize("compiler", ["", "true -v", "'true"])
def test_a_compiler_may_be_a_command_of_several_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setattr(cpp_extension, "load", fake_torch_load)
    monkeypatch.setenv("CXX", compiler)
    if compiler.count("'") == 1:
        with pytest.raises(cpu.KernelsUnavailableError, match="No closing quotation"):
            cpu.load()
    else:
        assert cpu.load().__name__ == "pagedd_cpu"


def wait_for(condition: Any) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_compilers_end_with_the_process_that_wanted_the_kernels(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-c*) echo $$ >{tmp_path}/pid.$$; sleep 600 ;; *) exec g++ "$@" ;; esac\n'
    )
    compiler.chmod(0o755)
    environ = os.environ | {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache"), "MAX_JOBS": "2"}
    environ.pop("CACHE_DIRECTORY", None)
    wanting = subprocess.Popen(
        [sys.executable, "-P", "-c", "from pagedd.kernels import cpu; cpu.load()"], env=environ, start_new_session=True
    )
    try:
        wait_for(lambda: len(list(tmp_path.glob("pid.*"))) == 2)
        pids = [int(path.read_text()) for path in tmp_path.glob("pid.*")]
        wanting.kill()
        wanting.wait()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(wanting.pid, signal.SIGKILL)
