"""The key file: keys, their names and scopes, keys that are hashed, and what it refuses."""

import hashlib
import logging
import os
from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.api_keys import check_names, find_key, hash_line, read_api_keys


@pytest.mark.parametrize("text", ["", "\n# nothing\n"])
def test_a_key_file_without_a_key_is_a_wrong_setting(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    for path in (tmp_path / "keys", tmp_path / "absent"):
        with pytest.raises(PageddError) as refused:
            read_api_keys(path)
        assert (refused.value.code, refused.value.field) == ("invalid_setting", "api_key_file")
        assert "Errno" not in refused.value.message


def test_a_key_may_have_a_name_and_a_name_several_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("laptop sk-old\nlaptop sk-new\n# a comment\nsk-nameless\n")
    keys = read_api_keys(tmp_path / "keys")
    assert [find_key(keys, shown) for shown in ("sk-old", "sk-new", "sk-nameless", "sk", "", "laptop")] == [
        *keys, None, None, None
    ]  # fmt: skip
    assert [key.name for key in keys[:2]] == ["laptop", "laptop"]
    assert len(keys[2].name) == 12
    assert "sk-nameless" not in repr(keys[2])


def test_a_hashed_key_is_the_same_as_the_key_and_is_not_its_hash(tmp_path: Path) -> None:
    drawn = "0123456789abcdef01234567"
    line = hash_line(drawn, "laptop", "admin")
    assert line == f"laptop sha256:{hashlib.sha256(drawn.encode()).hexdigest()} admin"
    (tmp_path / "keys").write_text(f"{line}\n{hash_line('f' * 24)}\n")
    laptop, nameless = keys = read_api_keys(tmp_path / "keys")
    assert find_key(keys, drawn) is laptop
    assert find_key(keys, line.split()[1]) is None
    assert (laptop.name, laptop.is_admin, nameless.is_admin) == ("laptop", True, False)
    (tmp_path / "keys").write_text("f" * 24)
    assert read_api_keys(tmp_path / "keys") == [nameless]


def test_keys_that_are_not_hashed_are_taken_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").write_text(f"laptop sk-1\n{hash_line('f' * 24)}\n")
    with caplog.at_level(logging.WARNING):
        assert len(read_api_keys(tmp_path / "keys")) == 2
    assert "holds 1 keys that are not hashed; `pagedd hash-key`" in caplog.text
    assert "sk-1" not in caplog.text


@pytest.mark.parametrize("key", ["", "secret", "f" * 23, "f" * 12 + " " + "f" * 12])
def test_a_key_that_could_be_guessed_is_not_hashed(key: str) -> None:
    with pytest.raises(PageddError, match="it has at least 24 and no blank") as refused:
        hash_line(key)
    assert not key or key not in str(refused.value)


@pytest.mark.parametrize("line", ["a b c", "ana! sk-1", f"{'n' * 65} sk-1", "a sk-1 admin b", "a sk-1 Admin"])
def test_a_line_that_is_neither_a_key_nor_a_named_key_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(f"sk-0\n{line}\n")
    with pytest.raises(PageddError, match="line 2: it is KEY, NAME KEY or NAME KEY admin") as refused:
        read_api_keys(tmp_path / "keys")
    assert "sk-1" not in str(refused.value)


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "g" * 64])
def test_a_digest_that_is_none_is_refused(tmp_path: Path, digest: str) -> None:
    (tmp_path / "keys").write_text(f"sha256:{digest}\n")
    with pytest.raises(PageddError, match="line 1: after sha256: come 64 hexadecimal digits"):
        read_api_keys(tmp_path / "keys")


def test_a_quota_of_a_key_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("laptop sk-1\n")
    keys = read_api_keys(tmp_path / "keys")
    check_names(["laptop"], keys)
    with pytest.raises(PageddError, match=r"quota\.key\.labtop: .*did you mean laptop\?"):
        check_names(["labtop"], keys)


@pytest.mark.parametrize("what", ["pipe", "endless", "huge"])
def test_a_key_file_that_is_no_small_file_is_refused_at_once(tmp_path: Path, what: str) -> None:
    path = Path("/dev/zero") if what == "endless" else tmp_path / "keys"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "huge":
        path.write_text("# sk\n" * (1 << 18))
    with pytest.raises(PageddError, match=r"no regular file|over 1048576 bytes"):
        read_api_keys(path)


@pytest.mark.parametrize(
    ("mode", "is_hashed", "warned"),
    [
        (0o600, False, []),
        (0o640, False, ["others can read the keys"]),
        (0o604, False, ["others can read the keys"]),
        (0o644, True, []),
        (0o620, True, ["others can write keys of their own"]),
        (0o602, True, ["others can write keys of their own"]),
        (0o666, False, ["others can write keys of their own", "others can read the keys"]),
    ],
)
def test_a_key_file_that_others_may_read_or_change_is_taken_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_hashed: bool, warned: list[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(hash_line("f" * 24) if is_hashed else "f" * 24)
    keys.chmod(mode)
    assert len(read_api_keys(keys)) == 1
    found = [record.getMessage() for record in caplog.records if "has mode" in record.getMessage()]
    assert [message.partition(": ")[2].partition(";")[0] for message in found] == [
        f"{what}{' in it' if 'read' in what else ' into it'}" for what in warned
    ]
    assert all(f"has mode {mode:04o}" in message for message in found)
