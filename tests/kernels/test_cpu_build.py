"""Building the C++ kernels: what an earlier build has left does not stop the next one. Nothing is compiled here."""

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils import cpp_extension

from pagedd.kernels import cpu


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build folder, with a compiler that is always there."""
    made = tmp_path / "kernels"
    monkeypatch.setattr(cpu, "_build_folder", lambda: made)
    monkeypatch.setattr(cpu, "load", functools.cache(cpu.load.__wrapped__))
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
