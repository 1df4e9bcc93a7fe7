"""Slots of host memory: which content lies where, and who leaves first. Blocks of 2 bytes, one letter each."""

import pytest

from pagedd.engine.errors import IntegrityError
from pagedd.engine.kv.host_tier import HostTier
from pagedd.engine.kv.stored_block import StoredBlock, descendants, next_block, root_key


def block(letter: str, parent: str = "") -> StoredBlock:
    return StoredBlock(letter.encode(), parent.encode(), (ord(letter),))


def tier_of(num_slots: int, letters: str = "") -> HostTier:
    tier = HostTier(memoryview(bytearray(2 * num_slots + 1)), 2)
    for letter, parent in zip(letters, " " + letters, strict=False):
        memory = tier.keep(block(letter, parent))
        assert memory is not None
        memory[:] = 2 * letter.encode()
    return tier


def held(tier: HostTier) -> str:
    """Most recently used first."""
    tier.check_integrity()
    return "".join(block.key.decode() for block in tier.newest_first())


def test_a_slot_gives_back_what_was_put_into_it() -> None:
    tier = tier_of(3, "abc")
    assert [bytes(tier.peek(key)) for key in (b"a", b"b", b"c")] == [b"aa", b"bb", b"cc"]


def test_the_least_recently_used_leaves_first() -> None:
    tier = tier_of(2, "abc")
    assert held(tier) == "cb"
    assert tier.figures.evictions_total == 1
    tier.touch([b"b"])
    tier.keep(block("d"))
    assert held(tier) == "db"


def test_the_head_of_a_run_that_was_used_outlives_its_tail() -> None:
    tier = tier_of(3, "abc")
    tier.touch([b"a", b"b", b"c"])
    assert held(tier) == "abc"


def test_what_is_being_read_keeps_its_slot_until_it_has_been() -> None:
    tier = tier_of(2, "ab")
    being_read = tier.read(b"a")
    memory = tier.keep(block("c"))
    assert memory is not None
    memory[:] = b"cc"
    assert bytes(being_read) == b"aa"
    assert held(tier) == "ca"
    tier.read(b"c")
    assert tier.keep(block("d")) is None
    tier.unpin()
    tier.keep(block("d"))
    assert held(tier) == "dc"


def test_a_slot_that_is_being_read_is_not_reused_although_its_block_was_forgotten() -> None:
    tier = tier_of(2, "ab")
    being_read = tier.read(b"a")
    tier.forget([b"a"])
    tier.check_integrity()
    memory = tier.keep(block("c"))
    assert memory is not None
    memory[:] = b"cc"
    assert bytes(being_read) == b"aa"
    tier.unpin()
    tier.keep(block("d"))
    assert held(tier) == "dc"


def test_token_ids_are_compared_on_a_hit() -> None:
    tier = tier_of(2, "a")
    assert tier.holds(block("a"))
    assert not tier.holds(StoredBlock(b"a", b"", (ord("b"),)))


def test_what_continues_a_prefix_is_found_and_nothing_else_though_its_own_blocks_are_elsewhere() -> None:
    blocks = [block(letter, parent) for letter, parent in ("bm", "cb", "dc", "xa", "yx", "z ")]
    assert descendants(blocks, [b"b"]) == set_of("bcd")
    assert descendants(blocks, [b"a"]) == set_of("axy")
    assert descendants(blocks, [b"c", b"x"]) == set_of("cdxy")
    assert descendants(blocks, [b"q"]) == set_of("q")


def set_of(letters: str) -> set[bytes]:
    return {letter.encode() for letter in letters}


def test_a_lost_slot_is_drift() -> None:
    tier = tier_of(2, "a")
    tier._free.clear()
    with pytest.raises(IntegrityError):
        tier.check_integrity()


def test_a_key_covers_the_root_and_every_token_before() -> None:
    roots = [root_key(b"caller a"), root_key(b"caller b")]
    keys = {next_block(root, tokens).key for root in roots for tokens in ((1, 2), (1, 3))}
    assert len(keys) == 4
    assert next_block(roots[0], (1, 2)) == next_block(roots[0], [1, 2])
    assert {len(key) for key in keys} == {32}
