"""A settings file keeps all that its owner wrote but for the keys that change."""

from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.tune import settings_file
from pagedd.daemon.tune.settings_file import merge, refuse_unwritable, write_settings


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
    write_settings(path, "new\n")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new\n", 0o640)
    assert [other.name for other in tmp_path.iterdir()] == ["pagedd.toml"]


def test_a_full_disk_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "pagedd.toml"
    path.write_text("old")

    def no_space(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(settings_file.os, "fchmod", no_space)
    with pytest.raises(PageddError, match="No space left on device"):
        write_settings(path, "new\n")
    assert [(other.name, other.read_text()) for other in tmp_path.iterdir()] == [("pagedd.toml", "old")]


def test_where_nothing_can_be_written_is_said_before_anything_is_tried(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "found.toml")
    with pytest.raises(PageddError, match=r"none/found.toml cannot be written: no such directory"):
        refuse_unwritable(tmp_path / "none" / "found.toml")
