"""The file of API keys."""

from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.api_keys import read_api_keys

KEY = "0123456789abcdef"


def key_file(folder: Path, content: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return path


def test_keys_stand_one_a_line_among_comments(tmp_path: Path) -> None:
    assert read_api_keys(key_file(tmp_path, f"# for the editor\n{KEY}\n\n  {KEY}2  \n", 0o640)) == [KEY, f"{KEY}2"]


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ("", 0o600, "holds no key"),
        ("# only this\n", 0o600, "holds no key"),
        ("short\n", 0o600, "key 1 is not at least 16"),
        (f"{KEY}\n{KEY} {KEY}\n", 0o600, "key 2 is not"),
        (f"{KEY}é\n", 0o600, "key 1 is not"),
        (b"\xff" * 20, 0o600, "can't decode"),
        (KEY, 0o644, "mode 0644 lets every user read"),
    ],
)
def test_a_file_without_usable_secret_keys_is_refused(
    tmp_path: Path, content: str | bytes, mode: int, said: str
) -> None:
    with pytest.raises(PageddError, match=r"^invalid_setting: api_key_file = ") as caught:
        read_api_keys(key_file(tmp_path, content, mode))
    assert said in caught.value.message
    assert KEY not in caught.value.message


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PageddError, match=r"^invalid_setting: .*No such file"):
        read_api_keys(tmp_path / "keys")
