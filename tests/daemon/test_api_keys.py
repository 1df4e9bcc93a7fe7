"""The key file: keys, their names, and what it refuses."""

from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.api_keys import check_names, read_api_keys


@pytest.mark.parametrize("text", ["", "\n# nothing\n"])
def test_a_key_file_without_a_key_is_a_wrong_setting(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    for path in (tmp_path / "keys", tmp_path / "absent"):
        with pytest.raises(PageddError) as refused:
            read_api_keys(path)
        assert (refused.value.code, refused.value.field) == ("invalid_setting", "api_key_file")


def test_a_key_may_have_a_name_and_a_name_several_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("laptop sk-old\nlaptop sk-new\n# a comment\nsk-nameless\n")
    keys = read_api_keys(tmp_path / "keys")
    assert [(key.secret, key.name) for key in keys[:2]] == [(b"sk-old", "laptop"), (b"sk-new", "laptop")]
    assert len(keys[2].name) == 12
    assert "sk-nameless" not in repr(keys[2])


@pytest.mark.parametrize("line", ["a b c", "ana! sk-1", f"{'n' * 65} sk-1"])
def test_a_line_that_is_neither_a_key_nor_a_named_key_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(f"sk-0\n{line}\n")
    with pytest.raises(PageddError, match="line 2: it is KEY or NAME KEY") as refused:
        read_api_keys(tmp_path / "keys")
    assert "sk-1" not in str(refused.value)


def test_a_quota_of_a_key_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("laptop sk-1\n")
    keys = read_api_keys(tmp_path / "keys")
    check_names(["laptop"], keys)
    with pytest.raises(PageddError, match=r"quota\.key\.labtop: .*did you mean laptop\?"):
        check_names(["labtop"], keys)
