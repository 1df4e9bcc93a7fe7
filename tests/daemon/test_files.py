"""Files complete or absent, one writer at a time, and write errors that say what to do."""

import errno
import multiprocessing
import threading
from pathlib import Path

import pytest

from pagedd.client.errors import PageddError
from pagedd.daemon.files import explained_write, file_lock, put_in_place, scratch_directory, verify_sha256

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


def test_a_file_and_a_folder_take_the_place_of_what_was_there(tmp_path: Path) -> None:
    for target in (tmp_path / "file", tmp_path / "folder"):
        for content in ("old", "new"):
            with scratch_directory(target) as scratch:
                made = scratch / "made"
                if target.name == "folder":
                    made.mkdir()
                    (made / "inside").write_text(content)
                else:
                    made.write_text(content)
                put_in_place(made, target)
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "folder" / "inside").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_an_interrupted_writer_leaves_nothing_and_a_killed_one_is_cleaned_up_after(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def write_and_be_interrupted() -> None:
        with scratch_directory(target) as scratch:
            (scratch / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_be_interrupted()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".model.scratch-killed").mkdir()
    with scratch_directory(target):
        assert not (tmp_path / ".model.scratch-killed").exists()


def test_a_lock_has_one_holder_at_a_time(tmp_path: Path) -> None:
    inside, most = 0, 0

    def hold() -> None:
        nonlocal inside, most
        for _ in range(50):
            with file_lock(tmp_path / "deep" / "lock"):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def hold_for_ever(path: Path, held: "multiprocessing.synchronize.Event") -> None:
    with file_lock(path):
        held.set()
        threading.Event().wait()


def test_a_killed_holder_lets_go_of_its_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    holder = context.Process(target=hold_for_ever, args=(tmp_path / "lock", held))
    holder.start()
    assert held.wait(10)
    holder.kill()
    holder.join()
    with file_lock(tmp_path / "lock"):
        pass


@pytest.mark.parametrize(
    ("number", "next_step"),
    [
        (errno.ENOSPC, "the disk is full; free some space"),
        (errno.EDQUOT, "the disk is full; free some space"),
        (errno.EACCES, "make the folder writable"),
        (errno.EROFS, "make the folder writable"),
        (errno.EIO, "check the disk"),
    ],
)
def test_a_write_error_says_what_to_do(number: int, next_step: str) -> None:
    with pytest.raises(PageddError) as refused, explained_write(Path("/cache/model")):
        raise OSError(number, "as the kernel says")
    assert refused.value.code == "model_unavailable"
    assert next_step in refused.value.message
    assert "/cache/model" in refused.value.message


def test_a_file_with_another_digest_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("hello")
    verify_sha256(path, HELLO)
    path.write_text("hallo")
    with pytest.raises(PageddError, match=f"checksum_mismatch.*expected {HELLO}"):
        verify_sha256(path, HELLO)
    assert not path.exists()
