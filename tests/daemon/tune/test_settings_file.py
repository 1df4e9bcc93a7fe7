"""A settings file keeps all that its owner wrote but for the keys that change."""

import os
import tomllib
from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.tune import settings_file
from pagedd.daemon.tune.settings_file import merge, read_settings, refuse_unwritable, write_settings


def test_a_key_takes_the_place_of_its_line_or_of_its_comment() -> None:
    text = "# Tokens in a KV block.\n# block_size = 16\n\nmax_num_seqs = 32\n\n[quota]\nweight = 2\n"
    assert merge(text, {"block_size": 8, "max_num_seqs": 64}) == (
        "# Tokens in a KV block.\nblock_size = 8\n\nmax_num_seqs = 64\n\n[quota]\nweight = 2\n"
    )


def test_a_new_key_stands_before_the_tables() -> None:
    assert merge("[quota]\nblock_size = 1\n", {"block_size": 8, "enable_prefix_caching": True}) == (
        "block_size = 8\nenable_prefix_caching = true\n[quota]\nblock_size = 1\n"
    )
    assert merge("", {"kv_cache_dtype": "fp8"}) == 'kv_cache_dtype = "fp8"\n'


def test_a_file_keeps_its_mode_and_is_never_half_written(tmp_path: Path) -> None:
    path = tmp_path / "pagedd.toml"
    path.write_text("old")
    path.chmod(0o640)
    write_settings(path, "new\n", "out")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new\n", 0o640)
    assert [other.name for other in tmp_path.iterdir()] == ["pagedd.toml"]


def test_a_full_disk_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "pagedd.toml"
    path.write_text("old")

    def no_space(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(settings_file.os, "fchmod", no_space)
    with pytest.raises(PageddError, match="No space left on device"):
        write_settings(path, "new\n", "out")
    assert [(other.name, other.read_text()) for other in tmp_path.iterdir()] == [("pagedd.toml", "old")]


@pytest.mark.parametrize(
    ("text", "merged"),
    [
        ("  block_size = 16\n", "block_size = 32\n"),
        ('"block_size" = 16\n', "block_size = 32\n"),
        ("block_size = 16  # because of ana\r\n", "block_size = 32  # because of ana\r\n"),
        ("#block_size = 16\nblock_size = 8\n", "#block_size = 16\nblock_size = 32\n"),
        ("# block_size = 16 was bad\n", "# block_size = 16 was bad\nblock_size = 32\n"),
        ('model = "x"\n  [quota]\nweight = 1', 'model = "x"\nblock_size = 32\n  [quota]\nweight = 1'),
        ('model = """\n[x]\n#block_size = 8\n"""', 'model = """\n[x]\n#block_size = 8\n"""\nblock_size = 32\n'),
        ('yield_to = [\n["a"],\n# block_size = 3\n]\n', 'yield_to = [\n["a"],\n# block_size = 3\n]\nblock_size = 32\n'),
        ("[quota]\n#block_size = 16\n", "block_size = 32\n[quota]\n#block_size = 16\n"),
    ],
)
def test_whatever_else_stands_in_the_file_reads_as_before(text: str, merged: str) -> None:
    assert merge(text, {"block_size": 32}) == merged
    assert tomllib.loads(merged) == tomllib.loads(text) | {"block_size": 32}


@pytest.mark.parametrize("text", ["block_size = \n", '\ufeffmodel = "x"\n', "block_size = [\n16]\n"])
def test_a_file_that_cannot_be_changed_safely_is_refused(text: str) -> None:
    with pytest.raises(PageddError, match="invalid_setting"):
        merge(text, {"block_size": 32})


def test_a_symbolic_link_stays_one_and_the_file_behind_it_keeps_its_owner(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "pagedd.toml", tmp_path / "pagedd.toml"
    real.write_text("old")
    if os.geteuid() == 0:
        os.chown(real, 12345, 54321)
    before = real.stat()
    link.symlink_to(real)
    write_settings(link, "new\n", "settings_file")
    assert link.is_symlink()
    assert real.read_text() == "new\n"
    assert (real.stat().st_uid, real.stat().st_gid) == (before.st_uid, before.st_gid)


def test_a_file_that_is_not_utf_8_is_refused_and_one_that_is_not_there_is_empty(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'model = "\xe4"\n')
    with pytest.raises(PageddError, match=r"latin\.toml cannot be read: it is not UTF-8"):
        read_settings(tmp_path / "latin.toml")
    assert read_settings(tmp_path / "none.toml") == ""


def test_where_nothing_can_be_written_is_said_before_anything_is_tried(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "found.toml", "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PageddError, match=r"none/found.toml cannot be written: no such directory"):
        refuse_unwritable(tmp_path / "none" / "found.toml", "out")
    with pytest.raises(PageddError, match="cannot be written: it is no plain file") as refused:
        refuse_unwritable(tmp_path, "settings_file")
    assert refused.value.field == "settings_file"
