"""The pool's picture: who holds what, and what changed from one frame to the next."""

import random

from pagedd.client.stats_frame import BlockMap
from pagedd.tui.letters import Mark
from pagedd.tui.pool import CACHED, ENDED, FREE, OWNED, SHARED, Key, Pool

A, B = ("a", 0), ("b", 0)
MARKS = {A: Mark(1), B: Mark(2)}


def block_map(states: list[int], ref_counts: list[int], **changes: list[int]) -> BlockMap:
    return BlockMap(
        block_size=4,
        states=bytes(states),
        ref_counts=bytes(ref_counts),
        **{name: bytes(values) for name, values in changes.items()},
    )


def take(pool: Pool, blocks: BlockMap, tables: dict[Key, list[int]], cached: dict[Key, int] | None = None) -> None:
    pool.take(blocks, tables, {key: MARKS[key] for key in tables}, {key: (cached or {}).get(key, 0) for key in tables})


def test_each_block_looks_like_its_owner_or_its_state() -> None:
    pool = Pool()
    blocks = block_map([2, 2, 0, 1, 2, 1, 2, 0], [1, 2, 0, 0, 1, 0, 1, 0], ages=[0, 0, 0, 1, 0, 11, 0, 0])
    take(pool, blocks, {A: [1, 0], B: [1, 4]})
    assert list(pool.looks) == [OWNED + 1, SHARED, FREE, CACHED, OWNED + 2, CACHED + 3, ENDED, FREE]
    assert pool.owners(1) == [(A, 0), (B, 0)]
    assert pool.changed is None, "the first picture is new as a whole"


def test_a_cached_block_ages_in_four_steps() -> None:
    pool = Pool()
    take(pool, block_map([1] * 7, [0] * 7, ages=[0, 2, 3, 5, 6, 9, 10]), {})
    assert [look - CACHED for look in pool.looks] == [0, 0, 1, 1, 2, 2, 3]


def test_a_frame_of_an_older_daemon_has_no_ages_and_no_fills() -> None:
    pool = Pool()
    take(pool, block_map([1, 2], [0, 1]), {A: [1]})
    assert list(pool.looks) == [CACHED, OWNED + 1]
    assert list(pool.partial) == [0, 0]


def test_a_used_block_with_room_left_is_partial() -> None:
    pool = Pool()
    take(pool, block_map([2, 2, 1], [1, 1, 0], fills=[4, 3, 2]), {A: [0, 1]})
    assert list(pool.partial) == [0, 1, 0]


def test_only_what_changed_is_named() -> None:
    pool = Pool()
    take(pool, block_map([2, 0, 0, 0], [1, 0, 0, 0], fills=[4, 0, 0, 0]), {A: [0]})
    take(pool, block_map([2, 2, 0, 0], [1, 1, 0, 0], fills=[4, 1, 0, 0]), {A: [0, 1]})
    assert (pool.changed, pool.filled, pool.taken, pool.evicted) == ([1], [1], {1}, frozenset())
    take(pool, block_map([2, 2, 0, 0], [1, 1, 0, 0], fills=[4, 2, 0, 0]), {A: [0, 1]})
    assert (pool.changed, pool.filled, pool.taken) == ([], [], frozenset())


def test_a_cached_block_given_to_new_tokens_was_evicted_and_one_that_was_hit_was_not() -> None:
    pool = Pool()
    take(pool, block_map([1, 1], [0, 0]), {})
    take(pool, block_map([2, 2], [1, 1]), {A: [0, 1]}, cached={A: 4})
    assert (pool.taken, pool.evicted) == ({0, 1}, {1})


def test_a_cached_block_that_became_free_was_evicted() -> None:
    pool = Pool()
    take(pool, block_map([1, 0], [0, 0]), {})
    take(pool, block_map([0, 0], [0, 0]), {})
    assert pool.evicted == {0}


def test_who_shared_a_block_has_it_alone_when_the_other_leaves() -> None:
    pool = Pool()
    take(pool, block_map([2, 2], [2, 1]), {A: [0, 1], B: [0]})
    take(pool, block_map([2, 0], [1, 0]), {B: [0]})
    assert list(pool.looks) == [OWNED + 2, FREE]


def test_a_block_that_passes_from_one_to_the_other_changes_its_owner() -> None:
    pool = Pool()
    take(pool, block_map([2, 2], [1, 1]), {A: [0], B: [1]})
    take(pool, block_map([2, 2], [1, 1]), {B: [1, 0]})
    assert list(pool.looks) == [OWNED + 2, OWNED + 2]


def test_a_pool_of_another_size_begins_anew() -> None:
    pool = Pool()
    take(pool, block_map([2, 2], [1, 1]), {A: [0, 1]})
    take(pool, block_map([0, 0, 2], [0, 0, 1]), {A: [2]})
    assert list(pool.looks) == [FREE, FREE, OWNED + 1]
    assert (pool.changed, pool.taken) == (None, frozenset())


def test_following_frame_by_frame_gives_what_a_fresh_look_gives() -> None:
    draw = random.Random(5)
    keys: list[Key] = [(f"s{number}", 0) for number in range(6)]
    marks = {key: Mark(number + 1) for number, key in enumerate(keys)}
    followed = Pool()
    tables: dict[Key, list[int]] = {}
    for _ in range(300):
        key = draw.choice(keys)
        match draw.randrange(3):
            case 0:
                tables.pop(key, None)
            case 1:
                tables[key] = [*tables.get(key, []), draw.randrange(20)]
            case 2:
                tables[key] = draw.sample(range(20), draw.randint(1, 6))
        tables = {key: list(dict.fromkeys(table)) for key, table in tables.items()}
        counts = [sum(block in table for table in tables.values()) for block in range(20)]
        blocks = block_map([2 if count else draw.randrange(2) for count in counts], counts)
        nothing = dict.fromkeys(tables, 0)
        fresh = Pool()
        followed.take(blocks, tables, {key: marks[key] for key in tables}, nothing)
        fresh.take(blocks, tables, {key: marks[key] for key in tables}, nothing)
        assert followed.looks == fresh.looks
