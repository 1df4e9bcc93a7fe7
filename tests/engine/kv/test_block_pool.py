"""The pool alone, six blocks, exact ids."""

import pytest

from pagedd.engine.errors import IntegrityError
from pagedd.engine.kv.block_pool import BlockPool


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used


def test_fresh_blocks_are_handed_out_in_physical_order() -> None:
    pool = BlockPool(6)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert counts(pool) == (3, 0, 3)


def test_an_empty_pool_answers_none_and_stays_sound() -> None:
    pool = BlockPool(2)
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, None]
    pool.check_integrity()


def test_free_blocks_go_before_cached_ones_and_cached_ones_least_recently_used_first() -> None:
    pool = BlockPool(4)
    for _ in range(4):
        pool.take()
    for block_id, keep in ((2, True), (0, True), (3, False), (1, False)):
        pool.release(block_id, keep=keep)
    assert counts(pool) == (2, 2, 0)
    assert pool.idle_order() == [1, 3, 2, 0]
    assert [pool.take() for _ in range(4)] == [1, 3, 2, 0]


def test_a_shared_block_is_idle_only_after_its_last_reference() -> None:
    pool = BlockPool(2)
    pool.take()
    pool.share(0)
    pool.release(0, keep=True)
    assert counts(pool) == (1, 0, 1)
    pool.release(0, keep=True)
    assert counts(pool) == (1, 1, 0)


def test_sharing_a_cached_block_takes_it_out_of_the_idle_list() -> None:
    pool = BlockPool(3)
    for _ in range(3):
        pool.take()
    for block_id in (0, 1, 2):
        pool.release(block_id, keep=True)
    pool.share(1)
    assert pool.idle_order() == [0, 2]
    assert pool.ref_count(1) == 1


def test_a_discarded_cached_block_becomes_the_first_free_one() -> None:
    pool = BlockPool(3)
    for _ in range(3):
        pool.take()
    for block_id in (0, 1, 2):
        pool.release(block_id, keep=True)
    pool.discard(1)
    assert pool.idle_order() == [1, 0, 2]
    assert counts(pool) == (1, 2, 0)


def test_states_and_reference_counts_are_one_byte_a_block() -> None:
    pool = BlockPool(3)
    pool.take(), pool.take()
    pool.share(1)
    pool.release(0, keep=True)
    assert pool.states() == bytes([1, 2, 0])
    assert pool.ref_counts() == bytes([0, 2, 0])


def test_misuse_raises() -> None:
    pool = BlockPool(2)
    with pytest.raises(IntegrityError, match="block 0 was released"):
        pool.release(0, keep=False)
    with pytest.raises(IntegrityError, match="block 1 is free"):
        pool.share(1)
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_integrity_check_notices_a_lost_block() -> None:
    pool = BlockPool(3)
    pool.num_free -= 1
    with pytest.raises(IntegrityError, match="counted 3 free"):
        pool.check_integrity()


def test_integrity_check_notices_a_picture_that_is_not_what_the_blocks_say() -> None:
    pool = BlockPool(3)
    pool.take()
    pool._blocks[0].ref_count = 2
    with pytest.raises(IntegrityError, match="picture of the pool"):
        pool.check_integrity()


def test_a_cached_block_ages_in_powers_of_two_and_others_have_no_age() -> None:
    now = 0.0
    pool = BlockPool(6, clock=lambda: now)
    for _ in range(5):
        pool.take()
    for block_id, at in ((0, 0.0), (1, 92.0), (2, 98.0), (3, 99.5)):
        now = at
        pool.release(block_id, keep=True)
    now = 100.0
    assert pool.states() == bytes([1, 1, 1, 1, 2, 0])
    assert pool.ages() == bytes([7, 4, 2, 0, 0, 0])  # 100, 8, 2 and 0.5 s


def test_last_use_is_now_for_a_used_block_and_unknown_for_a_free_one() -> None:
    now = 10.0
    pool = BlockPool(3, clock=lambda: now)
    pool.take(), pool.take()
    pool.release(1, keep=True)
    now = 13.0
    assert [pool.last_use_s(block_id) for block_id in range(3)] == [0.0, 3.0, None]


def test_a_block_that_is_used_again_is_young_again() -> None:
    now = 0.0
    pool = BlockPool(1, clock=lambda: now)
    pool.take()
    pool.release(0, keep=True)
    now = 50.0
    assert pool.ages() == bytes([6])
    pool.share(0)
    assert pool.ages() == bytes([0])
    pool.release(0, keep=True)
    assert pool.ages() == bytes([0])
