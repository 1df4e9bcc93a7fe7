"""Random lives with tiers behind the pool, over restarts and damaged files: every answer is that of a cold engine."""

import itertools
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from .test_scheduler_properties import EngineLife


@pytest.fixture(autouse=True)
def helpers(bench, cold, monkeypatch):
    numbers = itertools.count()  # a life that is lived again finds its files in the same order
    monkeypatch.setattr("secrets.token_hex", lambda size: f"{next(numbers):0{2 * size}x}")
    TieredLife.make_bench, TieredLife.cold = staticmethod(bench), staticmethod(cold)


class TieredLife(EngineLife):
    """The runner reads every context back through the block tables, so a wrong block in a tier cannot go unseen."""

    happened: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_blocks=st.integers(6, 16),
        block_size=st.sampled_from([2, 4]),
        seats=st.integers(1, 5),
        budget=st.integers(1, 24),
        host_slots=st.sampled_from([0, 1, 3, 8, 40]),
        lookahead=st.integers(0, 6),
        disk_blocks=st.sampled_from([0, 3, 5, 60]),
        weak_digest=st.booleans(),
        guesses=st.sampled_from([0, 3]),
    )
    def start(self, num_blocks, block_size, seats, budget, host_slots, lookahead, disk_blocks, weak_digest, guesses):
        self.folder = Path(tempfile.mkdtemp()) if disk_blocks else None
        self.arguments = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": seats,
            "max_num_batched_tokens": budget,
            "max_model_len": num_blocks * block_size,
            "num_speculative_tokens": guesses,
            "host_slots": host_slots,
            "lookahead": lookahead,
            "disk": self.folder,
            "disk_blocks": disk_blocks,
            "holds_reads": True,
        } | ({"hasher": lambda data: bytes([sum(data) % 256])} if weak_digest else {})
        self.begin()

    def begin(self) -> None:
        self.bench = self.make_bench(**self.arguments)
        self.gone: set[bytes] = set()  # keys that were evicted on request, if there was no step since `gone_at`
        self.gone_at = 0
        self.requests, self.aborted = {}, set()
        self.capacity = self.arguments["num_blocks"] * self.arguments["block_size"]

    @precondition(lambda self: self.bench.disk is not None and not self.bench.scheduler.has_work)
    @rule()
    def rest(self) -> None:
        self.happened["rest"] += 1
        self.bench.write_to_disk()
        self.check_gone()

    @precondition(lambda self: self.bench.disk is not None)
    @rule(num_blocks=st.integers(1, 3))
    def write_one_piece(self, num_blocks) -> None:
        self.bench.run()
        self.happened["piece"] += self.bench.writer.write_piece(num_blocks * self.bench.blocks.block_size)
        self.check_gone()

    @precondition(lambda self: self.bench.disk is not None)
    @rule(
        damage=st.sampled_from([None, None, "flip", "cut"]),
        meanwhile=st.sampled_from([None, "is too slow", "lost a file", "was forgotten", "leaves"]),
        seed=st.integers(0, 2**32),
    )
    def restart(self, damage, meanwhile, seed) -> None:
        self.happened["restart"] += 1
        pick = random.Random(seed)
        self.end()
        gone = self.gone if self.bench.scheduler.counters.steps == self.gone_at else set()
        asked = [request for request in self.requests.values() if len(request[0]) > self.arguments["block_size"]]
        files = sorted(file for file in self.folder.glob("*.kv") if file.stat().st_size)
        if damage is not None and files:
            self.happened[damage] += 1
            file = pick.choice(files)
            data = bytearray(file.read_bytes())
            position = pick.randrange(len(data))
            data[position] ^= 1 << pick.randrange(8)
            file.write_bytes(data if damage == "flip" else data[:position])
        self.begin()
        self.gone = gone
        self.check_gone()
        if asked:
            prompt, max_tokens, n = pick.choice(asked)
            self.requests["again"] = prompt, max_tokens, n
            self.bench.add("again", prompt, max_tokens=max_tokens, n=n)
            self.bench.finish(self.bench.scheduler.schedule())
        if meanwhile is not None and self.bench.blocks.reads:
            self.while_the_disk_is_read(meanwhile, pick)

    @precondition(lambda self: self.bench.held_reads)
    @rule()
    def the_disk_answers(self) -> None:
        self.happened["disk answers"] += 1
        self.bench.held_reads.pop(0)()

    def while_the_disk_is_read(self, happening, pick) -> None:
        self.happened[f"read {happening}"] += 1
        blocks = self.bench.blocks
        sequence = pick.choice(list(blocks.reads))
        read, _ = blocks.reads[sequence]
        place = pick.choice(read.places)
        if happening == "is too slow":
            read.wanted_s -= 1e9
        elif happening == "lost a file":
            place.segment.path.unlink(missing_ok=True)
        elif happening == "was forgotten":
            self.bench.tiers.forget_from([place.key], [])
        else:
            name = sequence.request.request_id
            assert self.bench.scheduler.abort(name)
            self.aborted.add(name)

    @precondition(lambda self: len(self.bench.blocks.prefix_cache))
    @rule(seed=st.integers(0, 2**32))
    def evict_a_prefix(self, seed) -> None:
        self.happened["evict_a_prefix"] += 1
        cache, pool = self.bench.blocks.prefix_cache, self.bench.blocks.pool
        entries = [entry for block in range(pool.num_blocks) if (entry := cache.entry(block)) is not None]
        head = random.Random(seed).choice(entries)
        key = cache.stored_block(head).key
        behind = {cache.stored_block(entry).key for entry in entries if key in self.lineage(entry)}
        used = {cache.stored_block(entry).key for entry in entries if pool.ref_count(entry.block_id)}
        self.bench.engine.evict_prefix(head.digest)
        left = [entry for block in range(pool.num_blocks) if (entry := cache.entry(block)) is not None]
        assert {cache.stored_block(entry).key for entry in left} & behind <= used
        self.gone, self.gone_at = behind - used, self.bench.scheduler.counters.steps
        self.check_gone()

    def lineage(self, entry) -> set[bytes]:
        """The keys of an entry and those before it."""
        keys = set()
        while entry is not None:
            keys.add(self.bench.blocks.prefix_cache.stored_block(entry).key)
            entry = entry.parent
        return keys

    def check_gone(self) -> None:
        if self.bench.scheduler.counters.steps != self.gone_at:
            return
        tiers = [tier for tier in (self.bench.tiers.host, self.bench.tiers.disk) if tier is not None]
        assert not [key for key in self.gone for tier in tiers if key in tier]

    def end(self) -> None:
        EngineLife.teardown(self)
        if self.bench.disk is not None:
            self.bench.write_to_disk()
            self.bench.disk.close()
        for tier, stats in self.bench.tiers.stats().items():
            self.happened[f"{tier} promotions"] += stats.promotions_total
            self.happened[f"{tier} evictions"] += stats.evictions_total

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.end()
        if getattr(self, "folder", None) is not None:
            shutil.rmtree(self.folder)


def test_whatever_happens_a_tier_never_gives_a_block_that_is_not_what_a_cold_engine_computes() -> None:
    # The same lives each time, because what happened in them is counted.
    lives = settings(
        max_examples=150,
        stateful_step_count=50,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    TieredLife.happened.clear()
    run_state_machine_as_test(TieredLife, settings=lives)
    happened = TieredLife.happened
    often = ("preempt", "fork", "host promotions", "host evictions", "disk promotions", "restart", "rest", "piece")
    reading = ("disk answers", "read is too slow", "read lost a file", "read was forgotten", "read leaves")
    assert all(happened[kind] > 30 for kind in often), happened
    assert all(happened[kind] for kind in ("flip", "cut", "evict_a_prefix", "disk evictions", *reading)), happened
