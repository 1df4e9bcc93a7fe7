"""Two models are never taken for one another because their files have one name."""

import os
from pathlib import Path

from pagedd.engine.model.fingerprint import fingerprint


def test_it_is_the_same_for_the_same_file_and_another_for_any_change(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(300_000))
    os.utime(path, (1, 1))
    found = {fingerprint(path)}
    assert fingerprint(path) in found
    for change in (lambda: path.write_bytes(bytes(299_999)), lambda: path.write_bytes(bytes(299_999) + b"x")):
        change()
        os.utime(path, (1, 1))
        assert fingerprint(path) not in found
        found.add(fingerprint(path))
    os.utime(path, (2, 2))
    assert fingerprint(path) not in found


def test_of_a_folder_it_covers_every_file(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("a")
        os.utime(tmp_path / name, (1, 1))
    before = fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("b")
    os.utime(tmp_path / "config.json", (1, 1))
    assert fingerprint(tmp_path) != before


def test_an_empty_file_has_one_too(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert len(fingerprint(tmp_path / "empty")) == 64
