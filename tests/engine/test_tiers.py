"""Tiers behind the pool, as a scheduler uses them. Blocks of 4 tokens; a block's bytes are its token ids."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from pagedd.engine.engine import Engine
from pagedd.engine.kv import disk_writer
from pagedd.engine.kv.disk_writer import IDLE_S, DiskWriter
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.stats import Eviction

PROMPT = list(range(1, 14))  # 3 full blocks and one token
OTHER = list(range(20, 44))


def fill_with_others(b, num: int = 1) -> None:
    """Computes `num` prompts of 6 blocks, so that a pool of 6 has evicted everything else."""
    for number in range(num):
        b.add(f"other{number}{b.scheduler.counters.steps}", [number, *OTHER[1:]], max_tokens=1)
        b.run()


def test_an_evicted_prefix_comes_back_from_host_memory_instead_of_being_computed(bench, cold) -> None:
    b = bench(num_blocks=6, host_slots=20)
    b.add("a", PROMPT, max_tokens=2)
    b.run()
    fill_with_others(b)
    num_computed = b.runner.num_computed
    b.add("b", PROMPT, max_tokens=2)
    b.run()
    assert b.output("b") == b.output("a") == cold(PROMPT, 2)
    assert b.num_cached("b") == 12
    assert b.runner.num_computed - num_computed == 2
    host = b.tiers.stats()["host"]
    assert (host.hits_total, host.promotions_total) == (3, 3)


def test_a_promoted_prefix_goes_on_from_the_blocks_that_the_pool_still_has(bench) -> None:
    b = bench(num_blocks=6, host_slots=20)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    b.add("x", OTHER[:16], max_tokens=1)  # takes 3 free blocks and the tail's
    b.run()
    assert b.blocks.evictions_total == 1
    b.add("b", PROMPT, max_tokens=1)
    b.run()
    assert b.num_cached("b") == 12
    assert b.runner.num_loaded == 1


def test_without_a_tier_behind_it_an_evicted_prefix_is_computed_again(bench) -> None:
    b = bench(num_blocks=6)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    fill_with_others(b)
    b.add("b", PROMPT, max_tokens=1)
    b.run()
    assert b.num_cached("b") == 0
    assert b.tiers.stats() == {}


def test_two_who_begin_alike_share_the_promoted_blocks(bench) -> None:
    b = bench(num_blocks=6, host_slots=20)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    fill_with_others(b)
    b.add("b", PROMPT, max_tokens=3)
    b.add("c", PROMPT, max_tokens=3)
    b.step()
    b.step()
    tables = [sequence.block_table for sequence in b.scheduler.running]
    assert tables[0][:3] == tables[1][:3]
    assert b.runner.num_loaded == 3


def test_a_promoted_block_is_indexed_when_the_step_that_fills_it_is_back(bench) -> None:
    b = bench(num_blocks=6, host_slots=20)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    fill_with_others(b)
    b.add("b", PROMPT, max_tokens=2)
    step = b.scheduler.schedule()
    (sequence,) = b.scheduler.running
    assert [block for block in sequence.block_table if block in b.blocks.prefix_cache] == []
    assert [block for block, _ in step.block_loads] == sequence.block_table[:3]
    b.scheduler.commit(step, b.runner.run(step))
    assert [block for block in sequence.block_table if block in b.blocks.prefix_cache] == sequence.block_table[:3]


def test_a_load_is_dropped_with_the_sequence_that_wanted_it(bench) -> None:
    b = bench(num_blocks=6, host_slots=20, max_num_seqs=1)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    fill_with_others(b)
    b.add("b", PROMPT, max_tokens=2)
    (sequence,) = b.scheduler.live_sequences()
    b.blocks.attach(sequence, [])
    b.blocks.release(sequence)
    assert b.tiers.take_copies()[1] == []
    b.run()
    assert b.num_cached("b") == 12


def test_callers_do_not_share_what_a_tier_holds(bench) -> None:
    b = bench(num_blocks=6, host_slots=40)
    for number, caller in enumerate(["u1", "u2", "u1"]):
        fill_with_others(b)
        b.add(f"r{number}", PROMPT, max_tokens=1, extras=(("caller", caller),))
        b.run()
    assert [b.num_cached(f"r{number}") for number in range(3)] == [0, 0, 12]


def test_callers_do_not_share_what_the_disk_holds(bench, tmp_path: Path) -> None:
    b = bench(num_blocks=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=1, extras=(("caller", "u1"),))
    b.run()
    b.write_to_disk()
    b.disk.close()
    b = bench(num_blocks=20, disk=tmp_path)
    for name, caller in (("b", "u2"), ("c", "u1")):
        b.add(name, PROMPT, max_tokens=1, extras=(("caller", caller),))
        b.run()
    assert [b.num_cached(name) for name in "bc"] == [0, 12]


def test_a_prefix_survives_a_restart(bench, cold, tmp_path: Path) -> None:
    b = bench(num_blocks=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=3)
    b.run()
    b.write_to_disk()
    b.disk.close()
    b = bench(num_blocks=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=3)
    b.run()
    assert (b.output("a"), b.num_cached("a")) == (cold(PROMPT, 3), 12)
    disk = b.tiers.stats()["disk"]
    assert (disk.hits_total, disk.promotions_total, disk.read_bytes_total) == (3, 3, 12)


def test_what_comes_from_the_disk_was_not_read_from_host_memory(bench, tmp_path: Path) -> None:
    b = bench(num_blocks=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=3)
    b.run()
    b.write_to_disk()
    b.disk.close()
    b = bench(num_blocks=20, host_slots=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=3)
    b.run()
    b.tiers.costs.load.note(3, 0.5)  # as the runner does that copies
    host, disk = b.tiers.stats().values()
    assert (disk.read_bytes_total, host.read_bytes_total, host.read_seconds_total) == (12, 0, 0.0)


def test_a_damaged_block_ends_the_hit_and_the_rest_is_computed(bench, cold, tmp_path: Path, caplog) -> None:
    b = bench(num_blocks=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=3)
    b.run()
    b.write_to_disk()
    b.disk.close()
    (path,) = tmp_path.glob("*.kv")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1  # the second of three blocks of 4 bytes
    path.write_bytes(data)
    b = bench(num_blocks=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=3)
    b.run()
    assert (b.output("a"), b.num_cached("a")) == (cold(PROMPT, 3), 4)
    assert "the block is computed" in caplog.text


def test_what_has_been_evicted_from_the_index_on_request_is_nowhere(bench, tmp_path: Path) -> None:
    b = bench(num_blocks=20, host_slots=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    b.write_to_disk()
    assert evict_first(b) == (3, 0, 0, 0)
    b.add("b", PROMPT, max_tokens=1)
    b.run()
    assert b.num_cached("b") == 0
    assert not list(tmp_path.glob("*.kv"))


def evict_first(b, prompt: list[int] = PROMPT) -> Eviction | None:
    """From the first block of `prompt` on."""
    entries = b.blocks.prefix_cache.roots.values()
    return b.engine.evict_prefix(next(entry.digest for entry in entries if entry.token_ids == tuple(prompt[:4])))


def drop_from_pool(b, *logical: int) -> None:
    """The pool loses these blocks of `PROMPT`, and only they lie in host memory from now on."""
    for index in logical:
        entry = next(
            entry
            for block_id in range(b.blocks.pool.num_blocks)
            if (entry := b.blocks.prefix_cache.entry(block_id))
            and entry.token_ids == tuple(PROMPT[4 * index : 4 * index + 4])
        )
        b.tiers.save_evicted(b.blocks.prefix_cache.stored_block(entry), entry.block_id)
        b.runner.save_blocks(b.tiers.take_saves())
        b.blocks.pool.discard(entry.block_id)
        b.blocks.prefix_cache.forget(entry.block_id)


@pytest.mark.parametrize("lost", [(1,), (2,), (1, 2)])
def test_an_evicted_prefix_is_gone_though_its_blocks_lie_in_the_pool_and_behind_it_by_turns(bench, lost) -> None:
    b = bench(num_blocks=20, host_slots=20, max_model_len=80)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    drop_from_pool(b, *lost)
    evict_first(b)
    assert b.tiers.stats()["host"].num_blocks == 0
    assert b.blocks.pool.num_cached == 0


def test_an_evicted_prefix_is_gone_from_the_disk_though_what_leads_there_is_in_host_memory(bench, tmp_path) -> None:
    b = bench(num_blocks=20, host_slots=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    b.write_to_disk()
    drop_from_pool(b, 1, 2)
    key = next(block.key for block in b.tiers.host.newest_first() if block.token_ids == tuple(PROMPT[8:12]))
    b.tiers.host.forget([key])
    evict_first(b)
    assert [stats.num_blocks for stats in b.tiers.stats().values()] == [0, 0]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_prefix_that_only_a_tier_has_is_evicted_by_its_digest(bench, tmp_path: Path, is_restarted: bool) -> None:
    b = bench(num_blocks=6, host_slots=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    (root,) = b.blocks.prefix_cache.roots.values()
    fill_with_others(b)
    b.write_to_disk()
    if is_restarted:
        b.disk.close()
        b = bench(num_blocks=6, disk=tmp_path)
    assert b.engine.evict_prefix(root.digest) == (0, 0, 0, 6)
    assert b.engine.evict_prefix(root.digest) is None
    b.add("b", PROMPT, max_tokens=1)
    b.run()
    assert b.num_cached("b") == 0


def test_an_eviction_says_what_the_disk_would_not_remove(bench, tmp_path: Path, nothing_can_be_removed) -> None:
    b = bench(num_blocks=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    b.write_to_disk()
    with nothing_can_be_removed():
        assert evict_first(b) == (3, 0, 3, 0)
    b.add("b", PROMPT, max_tokens=1)
    b.run()
    assert b.num_cached("b") == 0


def test_what_lies_behind_a_gap_that_nobody_can_name_goes_with_an_evicted_prefix(bench) -> None:
    b = bench(num_blocks=20, host_slots=20)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    b.add("x", OTHER[:9], max_tokens=1)
    b.run()
    drop_from_pool(b, 0, 1, 2)
    lost = next(block.key for block in b.tiers.host.newest_first() if block.token_ids == tuple(PROMPT[4:8]))
    b.tiers.host.forget([lost])
    other = next(entry for entry in b.blocks.prefix_cache.roots.values() if entry.token_ids == tuple(OTHER[:4]))
    b.tiers.save(b.blocks.prefix_cache.stored_block(next(iter(other.children.values()))), 0)
    head = next(block for block in b.tiers.host.newest_first() if block.token_ids == tuple(PROMPT[:4]))
    assert b.engine.evict_prefix(head.digest) == (0, 0, 0, 0)
    assert [block.token_ids for block in b.tiers.host.newest_first()] == [tuple(OTHER[4:8])]


def test_broken_numbers_take_along_what_lies_behind_a_gap(bench) -> None:
    b = bench(num_blocks=20, host_slots=20)
    b.add("a", [*PROMPT[:12], *OTHER[:5]], max_tokens=1)
    b.run()
    drop_from_pool(b, 1)
    b.add("b", PROMPT, max_tokens=2)
    step = b.scheduler.schedule()
    draws = [replace(draw, error_code="nan_logits") for draw in b.runner.run(step)]
    b.scheduler.commit(step, draws)
    assert b.tiers.stats()["host"].num_blocks == 0
    assert b.blocks.pool.num_cached == 0
    b.scheduler.check_integrity()


def test_an_engine_that_is_idle_lives_on_when_what_it_was_writing_is_evicted(bench, tmp_path: Path) -> None:
    for host_slots in (0, 20):
        b = bench(num_blocks=6, host_slots=host_slots, disk=tmp_path / str(host_slots))
        b.add("a", PROMPT, max_tokens=1)
        b.run()
        b.add("x", OTHER[:20], max_tokens=1)
        b.run()
        assert b.writer.write_piece(max_bytes=4)
        evict_first(b, OTHER if host_slots == 0 else PROMPT)
        while b.writer.write_piece(max_bytes=4):
            pass
        b.disk.close()
        b = bench(num_blocks=20, disk=tmp_path / str(host_slots))
        b.add("a", PROMPT, max_tokens=1)
        b.add("x", OTHER[:20], max_tokens=1)
        b.run()
        assert [b.num_cached("a"), b.num_cached("x")] == ([4, 0] if host_slots == 0 else [0, 16])


def test_who_begins_with_what_a_tier_had_is_a_hit_of_every_block_of_it(bench) -> None:
    b = bench(num_blocks=6, host_slots=20)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    fill_with_others(b)
    b.add("b", PROMPT, max_tokens=1)
    b.run()
    assert b.num_cached("b") == 12
    b.add("c", PROMPT, max_tokens=1)
    b.run()
    hits = {entry.token_ids: entry.num_hits for entry in map(b.blocks.prefix_cache.entry, range(6)) if entry}
    assert [hits[tuple(PROMPT[start : start + 4])] for start in (0, 4, 8)] == [2, 2, 2]


@pytest.mark.parametrize(("seconds_a_block", "num_blocks"), [(1e9, []), (0.002, [1] * 3), (1e-9, [3])])
def test_the_last_files_are_as_large_as_the_disk_is_quick(
    bench, tmp_path: Path, monkeypatch, seconds_a_block: float, num_blocks: list[int]
) -> None:
    b = bench(num_blocks=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    written: list[int] = []

    def write(blocks) -> bool:
        written.append(len(blocks))
        return True

    monkeypatch.setattr(b.disk, "write", write)
    monkeypatch.setattr(disk_writer.time, "monotonic", lambda: 0.0)
    b.disk.figures.written_bytes_total = b.disk.form.block_bytes
    b.disk.figures.write_seconds_total = seconds_a_block
    b.writer.write_all(0.003)
    assert written == num_blocks


def test_after_drift_nothing_of_what_was_distrusted_is_written(bench, tmp_path: Path) -> None:
    b = bench(num_blocks=20, host_slots=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    assert b.writer.write_piece(max_bytes=4)
    b.blocks.pool.num_free -= 1
    b.now += IDLE_S
    b.engine.check_when_idle()
    assert b.engine.stats().integrity_alarms_total == 1
    assert not b.writer.write_piece()
    b.disk.finish()
    assert not list(tmp_path.glob("*.kv"))


def test_a_block_that_holds_something_else_by_now_is_not_written(bench, tmp_path: Path) -> None:
    b = bench(num_blocks=20, host_slots=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    assert b.writer.write_piece(max_bytes=4)
    b.blocks.evict(next(iter(b.blocks.prefix_cache.roots.values())).digest)  # and nobody tells the writer
    assert not b.writer.write_piece()
    assert b.disk.stats().num_blocks == 0


def test_a_full_disk_keeps_the_hottest_and_rests(bench, tmp_path: Path) -> None:
    b = bench(num_blocks=20, disk=tmp_path, disk_blocks=4)
    for name, prompt in (("old", OTHER), ("new", PROMPT)):
        b.add(name, prompt, max_tokens=1)
        b.run()
    for _ in range(3):
        b.writer.note_change()
        while b.writer.write_piece(max_bytes=4):
            pass
    disk = b.disk.stats()
    assert (disk.stored_total, disk.evictions_total, disk.num_blocks) == (2, 0, 2)


def test_what_would_be_saved_again_counts_as_used(bench) -> None:
    b = bench(num_blocks=20, host_slots=20)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    drop_from_pool(b, 0, 1)
    first, second = reversed(b.tiers.host.newest_first())
    assert b.tiers.save(first, 0) is None
    assert b.tiers.host.newest_first() == [first, second]


def test_what_a_step_copies_is_not_taken_for_what_its_tokens_cost(bench) -> None:
    b = bench(num_blocks=6, host_slots=20)
    noted = []
    for number, prompt in enumerate((PROMPT, OTHER, PROMPT)):  # computed, evicts, is loaded
        b.engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=SamplingParams(max_tokens=1)))
        while b.engine.has_work:
            b.engine.step()
        noted.append(b.tiers.costs.compute.total)
    assert b.runner.num_loaded == 3
    assert noted == [13, 13, 13]


def test_drift_distrusts_every_tier(bench, tmp_path: Path) -> None:
    b = bench(num_blocks=6, host_slots=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    b.write_to_disk()
    fill_with_others(b)
    b.blocks.reset()
    assert [stats.num_blocks for stats in b.tiers.stats().values()] == [0, 0]
    b.disk.finish()
    assert not list(tmp_path.glob("*.kv"))


def test_blocks_are_saved_before_they_are_evicted_as_far_ahead_as_a_step_may_take(bench) -> None:
    b = bench(num_blocks=6, host_slots=20, lookahead=4)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    assert b.blocks.pool.num_free == 3
    assert b.tiers.stats()["host"].num_blocks == 1  # the fourth block to be taken is the first cached one
    step = None
    b.add("x", OTHER[:16], max_tokens=1)
    step = b.step()
    assert step.block_saves == []
    assert b.blocks.evictions_total == 1


def test_a_victim_of_preemption_gets_its_blocks_back_by_copies(bench, cold) -> None:
    outputs = {}
    for host_slots in (0, 20):
        b = bench(num_blocks=6, host_slots=host_slots)
        b.add("slow", PROMPT, max_tokens=9, priority=-50)
        b.step()
        b.step()
        b.add("urgent", OTHER[:20], max_tokens=4, priority=50)
        b.run()
        outputs[host_slots] = b.output("slow")
        assert b.scheduler.counters.preemptions == 1
        assert (b.scheduler.counters.recomputed_tokens > 4) == (host_slots == 0)
    assert outputs[0] == outputs[20] == cold(PROMPT, 9)


@pytest.mark.parametrize("slow", ["save", "load"])
def test_a_victim_is_recomputed_where_copies_are_measured_to_take_longer(bench, slow: str) -> None:
    b = bench(num_blocks=6, host_slots=20)
    b.tiers.costs.compute.note(1000, 1.0)
    getattr(b.tiers.costs, slow).note(1, 1.0)
    b.add("slow", PROMPT, max_tokens=9, priority=-50)
    b.step()
    b.add("urgent", OTHER[:20], max_tokens=4, priority=50)
    b.run()
    assert b.scheduler.counters.recomputed_tokens > 4
    assert b.tiers.stats()["host"].promotions_total == 0


def test_a_disk_is_not_read_where_computing_is_quicker(bench, cold, tmp_path: Path) -> None:
    b = bench(num_blocks=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=2)
    b.run()
    b.write_to_disk()
    b.disk.close()
    b = bench(num_blocks=20, disk=tmp_path)
    b.tiers.costs.compute.note(1000, 1.0)
    b.tiers.costs.read.note(1, 1.0)
    b.add("a", PROMPT, max_tokens=2)
    b.run()
    assert (b.output("a"), b.num_cached("a")) == (cold(PROMPT, 2), 0)
    assert b.tiers.stats()["disk"].hits_total == 1


def test_broken_numbers_leave_the_tiers_with_their_prefix(bench) -> None:
    b = bench(num_blocks=6, host_slots=20)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    fill_with_others(b)
    b.add("b", PROMPT, max_tokens=2)
    step = b.scheduler.schedule()
    (sequence,) = b.scheduler.running
    draws = [replace(draw, error_code="nan_logits") for draw in b.runner.run(step)]
    b.scheduler.commit(step, draws)
    assert b.blocks.find_prefix(sequence) == []
    b.add("c", PROMPT, max_tokens=1)
    b.run()
    assert b.num_cached("c") == 0


def writer_of(b) -> DiskWriter:
    return DiskWriter(b.blocks, b.tiers, b.disk, b.runner, lambda: b.now)


def test_nothing_is_written_before_it_has_been_quiet_for_a_while_and_then_once(bench, tmp_path: Path) -> None:
    b = bench(num_blocks=20, disk=tmp_path)
    writer = writer_of(b)
    assert writer.due_s is None
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    writer.note_change()
    assert writer.due_s == IDLE_S
    b.now += IDLE_S
    assert writer.due_s == 0
    assert writer.write_piece()
    assert not writer.write_piece()
    assert writer.due_s is None
    writer.note_change()
    assert not writer.write_piece()  # nothing new
    assert len(list(tmp_path.glob("*.kv"))) == 1


def test_the_hottest_blocks_are_written_first_and_heads_before_tails(bench, tmp_path: Path) -> None:
    b = bench(num_blocks=20, disk=tmp_path, disk_blocks=4)
    b.add("old", OTHER[:13], max_tokens=1)
    b.run()
    b.add("new", PROMPT, max_tokens=1)
    b.run()
    b.write_to_disk()
    b.disk.close()
    b = bench(num_blocks=20, disk=tmp_path, disk_blocks=4)
    for name, prompt in (("new", PROMPT), ("old", OTHER[:13])):
        b.add(name, prompt, max_tokens=1)
        b.run()
    assert [b.num_cached(name) for name in ("new", "old")] == [12, 4]


def test_blocks_in_host_memory_reach_the_disk_too(bench, tmp_path: Path) -> None:
    b = bench(num_blocks=6, host_slots=20, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    fill_with_others(b)
    b.write_to_disk()
    b.disk.close()
    b = bench(num_blocks=6, disk=tmp_path)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    assert b.num_cached("a") == 12


def test_a_step_between_two_pieces_makes_the_writer_look_anew(bench, tmp_path: Path) -> None:
    b = bench(num_blocks=6, disk=tmp_path)
    writer = writer_of(b)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    writer.note_change()
    assert writer.write_piece(max_bytes=4)
    fill_with_others(b)
    writer.note_change()
    while writer.write_piece(max_bytes=4):
        pass
    b.disk.close()
    b = bench(num_blocks=6, disk=tmp_path)
    for name, prompt in (("x", [0, *OTHER[1:]]), ("a", PROMPT)):
        b.add(name, prompt, max_tokens=1)
        b.run()
    assert (b.num_cached("x"), b.num_cached("a")) == (20, 4)


def test_a_disk_that_takes_nothing_is_not_tried_again_before_the_next_step(bench, tmp_path, monkeypatch, caplog):
    b = bench(num_blocks=20, disk=tmp_path)
    writer = writer_of(b)
    b.add("a", PROMPT, max_tokens=1)
    b.run()
    writer.note_change()
    monkeypatch.setattr("pagedd.engine.kv.disk_tier.write_segment", _no_space)
    assert not writer.write_piece()
    assert writer.due_s is None
    writer.note_change()
    assert not writer.write_piece()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def _no_space(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_an_engine_brings_its_blocks_to_the_disk_when_it_is_idle_and_before_it_ends(bench, tmp_path: Path) -> None:
    b = bench(num_blocks=20, disk=tmp_path)
    engine = Engine(b.runner, b.scheduler, clock=lambda: b.now)
    assert engine.idle_work_due_s is None
    engine.add(Request(request_id="a", prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=1)))
    while engine.has_work:
        engine.step()
        engine.after_step()
    assert engine.idle_work_due_s == IDLE_S
    assert not engine.check_when_idle()
    b.now += IDLE_S
    assert engine.check_when_idle()
    assert engine.stats().kv_tiers["disk"].num_blocks == 3
    assert not engine.check_when_idle()
    assert engine.idle_work_due_s is None
    engine.add(Request(request_id="b", prompt_token_ids=OTHER, params=SamplingParams(max_tokens=9)))
    engine.step()
    engine.after_step()
    engine.close(60)
    assert engine.stats().kv_tiers["disk"].num_blocks == 3 + 6
    assert engine.stats().num_blocks_used == 0
