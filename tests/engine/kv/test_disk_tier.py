"""Blocks on the disk: what comes back is what was written, or nothing. Blocks of 8 bytes and 2 tokens."""

import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pagedd.engine.kv import disk_segment, disk_tier
from pagedd.engine.kv.disk_segment import Segment, SegmentForm, UnusableSegment, read_segment, write_segment
from pagedd.engine.kv.disk_tier import DirectoryInUse, DiskTier, Forgotten
from pagedd.engine.kv.stored_block import StoredBlock

FORM = SegmentForm(identity=b"i" * 32, block_size=2, block_bytes=8)


def stored(letter: str, parent: str = "") -> StoredBlock:
    return StoredBlock(letter.encode() * 32, parent.encode() * 32 or bytes(32), (ord(letter), 70_000), bytes(16))


def blocks(letters: str) -> list[tuple[StoredBlock, bytearray]]:
    """Each the child of the one before."""
    parents = ["", *letters]
    return [(stored(one, parent), bytearray(one.encode() * 8)) for one, parent in zip(letters, parents, strict=False)]


@pytest.fixture
def open_tier(tmp_path: Path):
    opened: list[DiskTier] = []

    def open_one(num_files: float = 100, form: SegmentForm = FORM) -> DiskTier:
        """Room for so many files of one block. Whoever has it open lets go of it."""
        while opened:
            opened.pop().close()
        opened.append(DiskTier(tmp_path / "kv", int(num_files * FORM.file_bytes(1)), form))
        return opened[0]

    yield open_one
    while opened:
        opened.pop().close()


def read(tier: DiskTier, key: bytes) -> bytes | None:
    """What comes back of a block; None when nothing does."""
    reading = tier.start_read([key])
    while not reading.is_over:
        tier.await_reads(1.0)
    data = tier.take_read(reading)
    return bytes(data[0]) if data else None


def files(tier: DiskTier) -> list[Path]:
    return sorted(tier._directory.glob("*.kv"))


def held(tier: DiskTier) -> str:
    return "".join(letter for letter in "abcdefgh" if letter.encode() * 32 in tier)


def test_what_was_written_is_there_after_a_restart(open_tier) -> None:
    assert open_tier().write(blocks("ab"))
    tier = open_tier()
    assert tier.holds(stored("a"))
    assert read(tier, b"a" * 32) == b"aaaaaaaa"
    assert read(tier, b"b" * 32) == b"bbbbbbbb"
    assert not tier.holds(stored("c"))


def test_token_ids_are_compared_on_a_hit(open_tier) -> None:
    open_tier().write(blocks("a"))
    assert not open_tier().holds(replace(stored("a"), token_ids=(1, 2)))


def test_only_the_owner_may_read_directory_and_files(open_tier) -> None:
    before = os.umask(0)
    try:
        tier = open_tier()
        tier.write(blocks("a"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(tier._directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in tier._directory.iterdir()} == {0o600}


@pytest.mark.parametrize("num_synced", [0, 1], ids=["the file", "its name"])
def test_what_cannot_be_made_durable_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_synced: int
) -> None:
    synced: list[int] = []

    def fsync(descriptor: int) -> None:
        if len(synced) == num_synced:
            raise OSError(errno.EINVAL, "Invalid argument")
        synced.append(descriptor)

    monkeypatch.setattr("pagedd.engine.kv.disk_segment.os.fsync", fsync)
    with pytest.raises(OSError, match="Invalid argument"):
        write_segment(tmp_path, FORM, blocks("ab"))
    assert list(tmp_path.iterdir()) == []


def test_no_flipped_bit_of_a_file_is_ever_served(tmp_path: Path) -> None:
    whole = write_segment(tmp_path, FORM, blocks("ab"))
    data = whole.path.read_bytes()
    assert len(data) == whole.num_bytes == FORM.file_bytes(2)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        whole.path.write_bytes(flipped)
        read = []
        try:
            segment = read_segment(whole.path, FORM)
            assert segment.blocks == whole.blocks
            read += [segment.read(0), segment.read(1)]
        except UnusableSegment:
            assert len(read) < 2
        else:
            pytest.fail(f"a flipped bit at {position} went unseen")


def test_no_file_that_is_cut_off_is_used(tmp_path: Path) -> None:
    whole = write_segment(tmp_path, FORM, blocks("ab"))
    data = whole.path.read_bytes()
    for size in range(len(data)):
        whole.path.write_bytes(data[:size])
        with pytest.raises(UnusableSegment):
            read_segment(whole.path, FORM)
    whole.path.write_bytes(data + b"x")
    with pytest.raises(UnusableSegment):
        read_segment(whole.path, FORM)


def test_a_flipped_byte_costs_one_block_and_a_line_in_the_log(open_tier, caplog) -> None:
    open_tier().write(blocks("ab"))
    (path,) = files(open_tier())
    data = bytearray(path.read_bytes())
    data[-9] ^= 1  # of a
    path.write_bytes(data)
    tier = open_tier()
    assert read(tier, b"a" * 32) is None
    assert held(tier) == "b"
    assert read(tier, b"b" * 32) == b"bbbbbbbb"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes of"),
        (lambda path: path.write_bytes(b""), "cut off"),
        (lambda path: path.write_bytes(b"GGUF" * 99), "no file of KV blocks"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"\x02", b"\x03", 1)), "version 3"),
        (lambda path: (path.unlink(), path.mkdir()), "ignored"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), "ignored"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "no regular file"),
    ],
    ids=["cut off", "empty", "foreign", "of a later version", "a folder", "a link", "a pipe"],
)
def test_what_is_not_a_whole_file_of_this_version_is_ignored_with_a_line(open_tier, caplog, change, reason) -> None:
    tier = open_tier()
    tier.write(blocks("a"))
    tier.write(blocks("b"))
    change(tier._places[b"a" * 32][0].path)
    assert held(open_tier()) == "b"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert reason in warnings[0]


@pytest.mark.parametrize("field", ["identity", "block_size", "block_bytes"])
def test_another_models_or_forms_files_are_left_alone(open_tier, caplog, field: str) -> None:
    open_tier().write(blocks("ab"))
    other = replace(FORM, **{field: b"j" * 32 if field == "identity" else 4})
    with caplog.at_level(logging.INFO):
        tier = open_tier(form=other)
    assert held(tier) == ""
    assert "1 file of KV blocks is of another model" in caplog.text
    assert held(open_tier()) == "ab"


def test_the_files_least_recently_used_leave_when_the_room_is_needed(open_tier) -> None:
    tier = open_tier(num_files=3)
    for letter in "abc":
        tier.write(blocks(letter))
    tier.touch([b"a" * 32])
    tier.write(blocks("d"))
    assert held(tier) == "acd"
    assert (len(files(tier)), tier.figures.evictions_total) == (3, 1)


def test_what_was_used_last_is_known_after_a_restart(open_tier) -> None:
    tier = open_tier(num_files=3)
    for letter in "abc":
        tier.write(blocks(letter))
        time.sleep(0.01)
    tier.touch([b"a" * 32])
    assert held(open_tier(num_files=2)) == "ac"


def test_what_was_read_last_is_known_after_a_restart(open_tier) -> None:
    tier = open_tier(num_files=3)
    for letter in "abc":
        tier.write(blocks(letter))
    assert read(tier, b"a" * 32) == b"aaaaaaaa"
    assert held(open_tier(num_files=2)) == "ac"


def test_what_reading_took_is_counted(open_tier) -> None:
    tier = open_tier()
    tier.write(blocks("ab"))
    reading = tier.start_read([b"a" * 32, b"b" * 32])
    tier.finish()
    assert len(tier.take_read(reading)) == len(reading.block_seconds) == 2
    assert tier.figures.read_seconds_total == sum(reading.block_seconds) > 0
    assert tier.figures.read_bytes_total == 16


def test_a_block_that_was_forgotten_before_it_could_not_be_read_is_no_fault_of_the_disk(open_tier, caplog) -> None:
    tier = open_tier()
    tier.write(blocks("ab"))
    tier.file_of(b"a" * 32).path.unlink()
    reading = tier.start_read([b"a" * 32])
    tier.finish()
    tier.forget({b"a" * 32})
    assert tier.take_read(reading) == []
    assert not caplog.records


def test_files_of_other_models_count_and_leave_as_well(open_tier) -> None:
    open_tier(num_files=2).write(blocks("a"))
    tier = open_tier(num_files=2, form=replace(FORM, identity=b"j" * 32))
    tier.write(blocks("b"))
    assert tier.stats().num_bytes == 2 * FORM.file_bytes(1)
    tier.write(blocks("c"))
    assert (held(tier), len(files(tier))) == ("bc", 2)


def test_a_full_disk_stops_the_writing_with_one_line_and_nothing_else(open_tier, caplog, monkeypatch) -> None:
    tier = open_tier()
    tier.write(blocks("a"))

    def no_space(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(disk_segment.os, "write", no_space)
        assert not tier.write(blocks("b"))
        assert not tier.write(blocks("c"))
    assert caplog.text.count("No space left on device") == 1
    assert [path.suffix for path in tier._directory.iterdir() if path.name != "lock"] == [".kv"]
    assert read(tier, b"a" * 32) == b"aaaaaaaa"
    assert tier.write(blocks("d"))
    assert held(open_tier()) == "ad"


def test_a_disk_that_really_is_full_leaves_no_half_file(tmp_path: Path) -> None:
    """A limit on the size of files ends a write in the middle, as a full disk does."""
    program = (
        "import resource, signal, sys; from pathlib import Path;"
        "from pagedd.engine.kv.disk_segment import *; from pagedd.engine.kv.stored_block import StoredBlock;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "write_segment(Path(sys.argv[1]), SegmentForm(bytes(32), 2, 1 << 20),"
        "[(StoredBlock(bytes(32), bytes(32), (1, 2)), bytearray(1 << 20))])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_one_process_has_the_directory_at_a_time(open_tier, tmp_path: Path) -> None:
    open_tier().write(blocks("a"))
    with pytest.raises(DirectoryInUse, match="another process uses"):
        DiskTier(tmp_path / "kv", 10**6, FORM)


WRITER = """
import sys
from pathlib import Path
from pagedd.engine.kv.disk_segment import SegmentForm
from pagedd.engine.kv.disk_tier import DiskTier
from pagedd.engine.kv.stored_block import StoredBlock
tier = DiskTier(Path(sys.argv[1]), 1 << 30, SegmentForm(b"i" * 32, 2, 1 << 16))
print("writes", flush=True)
for number in range(10**6):
    keys = [b"%031d" % number + bytes([i]) for i in range(8)]
    tier.write([(StoredBlock(key, bytes(32), (number, i)), bytearray([i]) * (1 << 16)) for i, key in enumerate(keys)])
"""


def test_a_writer_that_is_killed_leaves_whole_files_and_lets_go_of_the_directory(tmp_path: Path, caplog) -> None:
    form = replace(FORM, block_bytes=1 << 16)
    for delay_s in (0.0, 0.02, 0.05):
        writer = subprocess.Popen([sys.executable, "-P", "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        tier = DiskTier(tmp_path, 1 << 30, form)
        assert not list(tmp_path.glob("*.unfinished"))
        for key in list(tier._places):
            assert read(tier, key) == bytes([key[-1]]) * (1 << 16)
        tier.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_is_forgotten_is_gone_after_a_restart_too(open_tier) -> None:
    tier = open_tier()
    tier.write(blocks("abc"))
    tier.write(blocks("d"))
    assert tier.forget({b"b" * 32}, 60) == Forgotten(num_left=0, num_beside=2)
    assert held(open_tier()) == "d"  # a and c shared its file


def test_what_is_forgotten_is_gone_though_a_fault_of_the_disk_hid_it(open_tier, monkeypatch) -> None:
    tier = open_tier()
    tier.write(blocks("a"))

    def broken(segment: Segment, index: int) -> bytearray:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "read", broken)
        assert read(tier, b"a" * 32) is None
    tier.write(blocks("a"))
    tier.forget({b"a" * 32})
    assert held(open_tier()) == ""


def test_a_file_that_goes_takes_its_own_blocks_along_without_a_look_at_all_others(open_tier) -> None:
    class Places(dict):
        def items(self):
            raise AssertionError("every block was looked at")

        __iter__ = keys = values = items

    tier = open_tier()
    for letter in "abcd":
        tier.write(blocks(letter))
    tier._places = Places(tier._places)
    tier.forget({b"a" * 32})
    assert held(tier) == "bcd"
    tier.clear()
    assert held(tier) == ""


def test_a_directory_that_cannot_be_made_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        DiskTier(tmp_path / "file" / "kv", 10**6, FORM)


def test_the_log_line_of_a_start_says_how_many_blocks_there_are(open_tier, caplog) -> None:
    open_tier().write(blocks("abc"))
    with caplog.at_level(logging.INFO, disk_tier.__name__):
        open_tier()
    assert "kv has 3 KV blocks of this model" in caplog.text


def test_files_with_other_names_are_neither_counted_nor_removed(open_tier, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    others = [tmp_path / "kv" / name for name in ("main.kv", "0123.kv", "notes.unfinished", "0123456789ABCDEF.kv")]
    for path in others:
        path.write_bytes(bytes(10_000))
    tier = open_tier(num_files=2)
    assert tier.stats().num_bytes == 0
    for letter in "abcd":
        assert tier.write(blocks(letter))
    assert all(path.stat().st_size == 10_000 for path in others)


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o704])
def test_a_directory_that_is_open_to_others_is_refused_with_its_mode(open_tier, tmp_path: Path, mode: int) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    with pytest.raises(PermissionError, match=f"mode {mode:o}"):
        open_tier()


def test_what_cannot_be_removed_still_takes_its_room_and_is_served(open_tier, nothing_can_be_removed, caplog) -> None:
    tier = open_tier(num_files=2)
    assert tier.write(blocks("a"))
    assert tier.write(blocks("b"))
    with nothing_can_be_removed():
        for letter in "cd":
            assert not tier.write(blocks(letter))
    on_disk = sum(path.stat().st_size for path in files(tier))
    assert on_disk == tier.stats().num_bytes == 2 * FORM.file_bytes(1)
    assert (held(tier), tier.figures.evictions_total) == ("ab", 0)
    assert len(caplog.records) == 1
    assert tier.write(blocks("e"))
    assert held(tier) == "be"


def test_a_smaller_limit_on_a_directory_that_is_read_only_serves_what_is_there(
    open_tier, nothing_can_be_removed
) -> None:
    open_tier().write(blocks("a"))
    with nothing_can_be_removed():
        assert held(open_tier(num_files=0.5)) == "a"
    assert held(open_tier(num_files=0.5)) == ""


def test_what_cannot_be_forgotten_is_counted_and_not_served_and_may_be_tried_again(
    open_tier, nothing_can_be_removed
) -> None:
    tier = open_tier()
    tier.write(blocks("ab"))
    tier.write(blocks("c"))
    with nothing_can_be_removed():
        assert tier.forget({b"a" * 32, b"c" * 32}, 60) == Forgotten(num_left=2, num_beside=0)
    assert held(tier) == "b"
    assert held(open_tier()) == "abc"
    tier = open_tier()
    with nothing_can_be_removed():
        tier.forget({b"a" * 32}, 60)
    assert tier.forget({b"a" * 32}, 60) == Forgotten(num_left=0, num_beside=1)
    assert held(open_tier()) == "c"


def test_what_is_distrusted_is_not_served_though_it_cannot_be_removed(open_tier, nothing_can_be_removed) -> None:
    tier = open_tier()
    tier.write(blocks("ab"))
    with nothing_can_be_removed():
        tier.clear()
    assert held(tier) == ""


@pytest.mark.parametrize(("goes", "left"), [(0, "ab"), (1, "a")])
def test_a_block_that_lies_in_two_files_outlives_either(open_tier, goes: int, left: str) -> None:
    tier = open_tier()
    tier.write(blocks("a"))
    tier.write(blocks("ab"))
    tier._remove(list(tier._file_bytes)[goes])
    assert held(tier) == left
    assert read(tier, b"a" * 32) == b"aaaaaaaa"
    assert tier.stats().num_blocks == len(left)


@pytest.mark.parametrize("jump_ns", [3600 * 10**9, -3600 * 10**9])
def test_after_a_clock_was_set_the_order_of_use_is_the_order_of_use(open_tier, monkeypatch, jump_ns: int) -> None:
    tier, clock_ns = open_tier(), time.time_ns
    for letter in "abc":
        tier.write(blocks(letter))
    monkeypatch.setattr(time, "time_ns", lambda: clock_ns() + jump_ns)
    tier.touch([b"a" * 32])
    tier.write(blocks("d"))
    tier = open_tier(num_files=2)
    assert held(tier) == "ad"


def test_a_file_from_the_future_is_as_old_as_the_start_that_found_it(open_tier) -> None:
    tier = open_tier()
    for letter in "ab":
        tier.write(blocks(letter))
    future_s = time.time() + 10**8
    os.utime(tier.file_of(b"a" * 32).path, (future_s, future_s))
    tier = open_tier()
    time.sleep(0.01)
    tier.touch([b"b" * 32])
    assert held(open_tier(num_files=1)) == "b"


def test_a_pipe_that_takes_a_files_place_costs_its_blocks_and_holds_nobody_up(open_tier) -> None:
    tier = open_tier()
    tier.write(blocks("a"))
    (path,) = files(tier)
    path.unlink()
    os.mkfifo(path)
    assert read(tier, b"a" * 32) is None
