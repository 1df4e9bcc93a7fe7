"""Blocks that come from the disk: nobody waits for it but who wants them, and that not for ever.

Blocks of 4 tokens; a block's bytes are its token ids.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedd.engine.kv import block_manager, disk_thread, disk_tier, disk_writer, tiers
from pagedd.engine.kv.disk_segment import Segment

PROMPT = list(range(1, 14))  # 3 full blocks and one token
OTHER = [30, 31, 32]
UNSAVED = list(range(30, 39))  # 2 full blocks and one token, not on the disk


@pytest.fixture
def stored(bench, tmp_path: Path):
    """`stored(...)`: an engine that has just started, with `PROMPT` on its disk and nowhere else."""

    def start(**settings: object):
        before = bench(num_blocks=20, disk=tmp_path)
        before.add("before", PROMPT, max_tokens=1)
        before.run()
        before.write_to_disk()
        before.disk.close()
        return bench(**({"num_blocks": 20, "disk": tmp_path} | settings))

    return start


class HangingDisk:
    """One that answers nothing until `answers` is set; `is_asked` once somebody waits for it."""

    def __init__(self) -> None:
        self.is_asked, self.answers = threading.Event(), threading.Event()


@pytest.fixture
def hanging_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    disk, read = HangingDisk(), Segment.read

    def read_late(segment: Segment, index: int) -> bytearray:
        disk.is_asked.set()
        assert disk.answers.wait(60)
        return read(segment, index)

    monkeypatch.setattr(Segment, "read", read_late)
    yield disk
    disk.answers.set()


def names(step) -> list[str]:
    return [item.sequence.request.request_id for item in step.scheduled]


def lose_what_the_pool_has(b) -> None:
    for block_id in range(b.blocks.pool.num_blocks):
        if b.blocks.pool.is_cached(block_id):
            b.blocks.pool.discard(block_id)
            b.blocks.prefix_cache.forget(block_id)


def test_others_go_on_while_the_disk_is_read(stored, cold) -> None:
    b = stored(holds_reads=True)
    b.add("a", OTHER, max_tokens=20)
    b.step()
    b.add("b", PROMPT, max_tokens=2)
    assert [names(b.step()) for _ in range(3)] == [["a"]] * 3
    assert b.blocks.pool.num_used == 2 + 3
    b.answer_reads()
    assert names(b.step()) == ["a", "b"]
    b.run()
    assert (b.output("a"), b.output("b")) == (cold(OTHER, 20), cold(PROMPT, 2))
    assert (b.num_cached("b"), b.runner.num_loaded) == (12, 3)


def test_an_engine_with_nothing_else_to_do_waits_for_the_disk_and_computes_nothing_meanwhile(stored) -> None:
    b = stored(holds_reads=True)
    b.add("a", PROMPT, max_tokens=1)
    assert b.engine.step() == []
    assert b.engine.has_work
    assert b.engine.stats().steps_total == 0
    b.answer_reads()
    (output,) = b.engine.step()
    assert (output.finish_reason, output.num_cached_tokens) == ("length", 12)


def test_a_prefix_that_two_want_is_read_once(stored, cold) -> None:
    b = stored(holds_reads=True)
    b.add("a", PROMPT, max_tokens=2)
    b.add("b", PROMPT, max_tokens=2)
    b.add("c", OTHER, max_tokens=2)
    assert names(b.step()) == ["c"]
    assert len(b.held_reads) == 1
    b.run()
    assert b.output("a") == b.output("b") == cold(PROMPT, 2)
    assert (b.num_cached("a"), b.num_cached("b"), b.runner.num_loaded) == (12, 12, 3)


def test_whoever_leaves_while_its_blocks_are_read_leaves_nothing_behind(stored, cold) -> None:
    b = stored(holds_reads=True)
    b.add("a", PROMPT, max_tokens=2)
    b.scheduler.schedule()
    assert b.scheduler.abort("a")
    assert b.blocks.pool.num_used == 0
    assert not b.blocks.reads
    b.held_reads.pop()()
    assert b.disk.max_reads == disk_tier.MAX_READING_BYTES // 4
    b.add("a", PROMPT, max_tokens=2)
    b.run()
    assert (b.output("a"), b.num_cached("a")) == (cold(PROMPT, 2), 12)


def test_a_more_urgent_request_takes_the_seat_of_one_that_waits_for_the_disk(stored, cold) -> None:
    b = stored(holds_reads=True, max_num_seqs=1)
    b.add("slow", PROMPT, max_tokens=2, priority=-50)
    b.scheduler.schedule()
    b.add("urgent", OTHER, max_tokens=2, priority=50)
    assert names(b.step()) == ["urgent"]
    b.run()
    assert (b.output("slow"), b.num_cached("slow")) == (cold(PROMPT, 2), 12)
    assert b.output("urgent") == cold(OTHER, 2)


@pytest.mark.parametrize("fault", [OSError(5, "Input/output error"), MemoryError(), ValueError("never seen")])
def test_a_disk_that_fails_costs_the_blocks_from_there_on(stored, cold, monkeypatch, caplog, fault) -> None:
    read = Segment.read

    def fail_at_the_second(segment: Segment, index: int) -> bytearray:
        if index == 1:
            raise fault
        return read(segment, index)

    monkeypatch.setattr(Segment, "read", fail_at_the_second)
    b = stored()
    b.add("a", PROMPT, max_tokens=2)
    b.run()
    assert (b.output("a"), b.num_cached("a"), b.runner.num_loaded) == (cold(PROMPT, 2), 4, 1)
    assert caplog.text.count("the block is computed") == 1


def test_a_disk_that_hangs_is_waited_for_once(stored, cold, hanging_disk, monkeypatch) -> None:
    monkeypatch.setattr(tiers, "MIN_PATIENCE_S", 0.01)
    b = stored()
    b.add("a", PROMPT, max_tokens=2)
    b.run()
    assert (b.output("a"), b.num_cached("a")) == (cold(PROMPT, 2), 0)


def test_a_disk_that_hangs_is_neither_read_nor_written_before_it_answers(
    stored, cold, hanging_disk, monkeypatch
) -> None:
    monkeypatch.setattr(disk_thread, "STUCK_S", 0.0)
    b = stored()
    b.add("a", PROMPT, max_tokens=2)
    b.scheduler.schedule()
    assert hanging_disk.is_asked.wait(60)
    assert b.scheduler.abort("a")
    b.add("b", PROMPT, max_tokens=2)
    assert names(b.step()) == ["b"]
    b.run()
    assert (b.output("b"), b.num_cached("b")) == (cold(PROMPT, 2), 0)
    b.add("c", UNSAVED, max_tokens=1)
    b.run()
    b.writer.note_change()
    assert not b.writer.write_piece()
    assert b.writer.due_s == disk_writer.IDLE_S, "what is to be written stays due"
    b.writer.write_all(60)
    assert b.disk.stats().stored_total == 0
    monkeypatch.setattr(disk_thread, "STUCK_S", 60.0)
    hanging_disk.answers.set()
    b.disk.finish()
    b.writer.note_change()
    assert b.writer.write_piece()
    assert b.disk.stats().stored_total == 2


def test_no_step_waits_for_a_disk_that_neither_stamps_nor_removes(stored, cold, monkeypatch) -> None:
    """Broken numbers forget what the disk has, and a look for what is to be written stamps what is there."""
    may_answer, is_asked, unlink, utime = threading.Event(), threading.Event(), Path.unlink, os.utime

    def answer_late(ask):
        def late(*args, **kwargs):
            assert threading.current_thread() is not threading.main_thread()
            is_asked.set()
            assert may_answer.wait(60)
            return ask(*args, **kwargs)

        return late

    b = stored()
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    b.disk.finish()
    monkeypatch.setattr(disk_thread, "STUCK_S", 0.0)
    monkeypatch.setattr(Path, "unlink", answer_late(unlink))
    monkeypatch.setattr(os, "utime", answer_late(utime))
    try:
        b.writer.note_change()
        assert not b.writer.write_piece()
        assert is_asked.wait(60)
        assert b.disk.is_stuck
        b.add("b", PROMPT, max_tokens=2)
        step = b.scheduler.schedule()
        b.blocks.distrust(step.scheduled[0].sequence)
        assert not any(b.disk.holds(block) for block in b.disk.blocks())
        b.finish(step)
        b.run()
        assert b.output("b") == cold(PROMPT, 2)
    finally:
        may_answer.set()
        monkeypatch.setattr(disk_thread, "STUCK_S", 60.0)
    b.disk.finish()
    assert b.disk.stats().num_bytes == 0


def test_a_prefix_is_evicted_though_the_disk_does_not_remove_it_and_that_is_said(stored, monkeypatch) -> None:
    may_answer, unlink = threading.Event(), Path.unlink
    monkeypatch.setattr(block_manager, "STUCK_S", 0.01)
    monkeypatch.setattr(Path, "unlink", lambda *args, **kwargs: may_answer.wait(60) and unlink(*args, **kwargs))
    b = stored()
    head = next(iter(b.disk.blocks()))
    assert b.engine.evict_prefix(head.digest) == (0, 0, 3, 0)
    assert not b.disk.holds(head)
    may_answer.set()
    b.disk.finish()
    assert b.disk.stats().num_bytes == 0


def test_a_request_whose_disk_gets_no_thread_is_computed_and_the_next_one_is_read(stored, cold, monkeypatch) -> None:
    b = stored()
    with monkeypatch.context() as patch:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        b.add("a", PROMPT, max_tokens=2)
        b.run()
    assert (b.output("a"), b.num_cached("a")) == (cold(PROMPT, 2), 0)
    assert b.disk.max_reads == disk_tier.MAX_READING_BYTES // 4
    lose_what_the_pool_has(b)
    b.add("b", PROMPT, max_tokens=2)
    b.run()
    assert (b.output("b"), b.num_cached("b")) == (cold(PROMPT, 2), 12)


def test_a_block_that_takes_longer_than_anybody_waits_is_waited_for_once(
    stored, cold, hanging_disk, monkeypatch
) -> None:
    monkeypatch.setattr(tiers, "MIN_PATIENCE_S", 0.01)
    b = stored()
    b.tiers.costs.compute.note(1000, 0.001)
    b.add("a", PROMPT, max_tokens=2)
    b.run()
    assert b.tiers.costs.read.each > b.tiers.costs.compute.each * 4
    hanging_disk.answers.set()
    b.disk.finish()
    lose_what_the_pool_has(b)
    b.add("b", PROMPT, max_tokens=2)
    assert names(b.step()) == ["b"]
    assert not b.blocks.reads
    assert b.runner.num_loaded == 0


def test_nothing_is_read_behind_more_than_computing_it_would_take(stored) -> None:
    b = stored(holds_reads=True)
    b.tiers.costs.compute.note(1, 0.1)
    b.tiers.costs.read.note(1, 0.3)
    b.add("a", PROMPT, max_tokens=2)
    b.scheduler.schedule()
    root = b.blocks.prefix_cache.root_key(())
    wanted = [tuple(PROMPT[start : start + 4]) for start in (0, 4, 8)]
    # Three blocks are read in 0.9 s first. One is computed in 0.4 s, three in 1.2 s.
    assert b.tiers.find_run(root, wanted[:1]) == ([], None)
    data, read = b.tiers.find_run(root, wanted)
    assert (data, len(read.places)) == ([None] * 3, 3)


def test_a_reader_that_is_preempted_while_it_waits_hits_its_prefix_once(stored) -> None:
    b = stored(holds_reads=True, max_num_seqs=1)
    b.add("head", PROMPT[:5], max_tokens=1)
    b.run()
    b.add("slow", PROMPT, max_tokens=2, priority=-50)
    b.scheduler.schedule()
    b.add("urgent", OTHER, max_tokens=2, priority=50)
    b.run()
    assert b.finished["slow", 0].num_cached_tokens == 12
    entries = [entry for entry in map(b.blocks.prefix_cache.entry, range(20)) if entry is not None]
    hits = {entry.token_ids: entry.num_hits for entry in entries}
    assert [hits[tuple(PROMPT[start : start + 4])] for start in (0, 4, 8)] == [2, 1, 1]


def test_what_a_slow_disk_has_brought_by_then_is_used(stored, cold, monkeypatch) -> None:
    monkeypatch.setattr(tiers, "MIN_PATIENCE_S", 0.0)
    b = stored(holds_reads=True)
    b.add("a", PROMPT, max_tokens=2)
    b.scheduler.schedule()
    ((read, _),) = b.blocks.reads.values()
    read.data.append(read.places[0].segment.read(0))
    b.run()
    b.held_reads.pop()()
    assert (b.output("a"), b.num_cached("a"), b.runner.num_loaded) == (cold(PROMPT, 2), 4, 1)
    assert len(read.data) == 1, "what was given up is read no further"


@pytest.mark.parametrize("has_come", [False, True])
def test_a_prefix_that_is_evicted_while_it_is_read_is_computed_and_is_nowhere(
    stored, cold, tmp_path: Path, has_come
) -> None:
    b = stored(holds_reads=True)
    b.add("a", PROMPT, max_tokens=2)
    b.scheduler.schedule()
    ((read, _),) = b.blocks.reads.values()
    if has_come:
        b.held_reads.pop()()
    assert b.engine.evict_prefix(read.places[0].segment.blocks[0].digest) == (0, 0, 0, 0)
    b.run()
    assert (b.output("a"), b.num_cached("a"), b.runner.num_loaded) == (cold(PROMPT, 2), 0, 0)
    assert not list(tmp_path.glob("*.kv"))


def test_an_engine_that_ends_does_not_wait_for_a_disk_that_hangs(stored, hanging_disk) -> None:
    b = stored()
    b.add("a", PROMPT, max_tokens=2)
    b.scheduler.schedule()
    b.engine.close(60)
    assert b.blocks.pool.num_used == 0
    assert not b.blocks.reads


def test_a_process_ends_though_its_disk_hangs() -> None:
    program = """
import threading
from pagedd.engine.kv.disk_thread import DiskThread

DiskThread().ask([threading.Event().wait])
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


def test_so_much_memory_is_taken_for_what_is_read_and_what_is_wanted_beyond_is_computed(
    stored, cold, monkeypatch
) -> None:
    monkeypatch.setattr(disk_tier, "MAX_READING_BYTES", 8)
    b = stored(holds_reads=True)
    b.add("a", PROMPT, max_tokens=2)
    b.run()
    assert b.output("a") == cold(PROMPT, 2)
    assert (b.num_cached("a"), b.runner.num_loaded) == (8, 2)
