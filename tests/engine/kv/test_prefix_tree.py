"""The index as a tree of runs, block size 4: what is one run, in which order, and what eviction leaves."""

from collections.abc import Callable

import pytest

from pagedd.engine.kv.prefix_tree import PrefixRun, PrefixTree, prefix_tree

SYSTEM = [1, 1, 1, 1, 2, 2, 2, 2]
ANA = [3, 3, 3, 3, 4, 4, 4, 4]
BOB = [5, 5, 5, 5]


@pytest.fixture
def b(bench):
    """Ana and Bob, a second apart, each with the same system prompt; all done."""
    b = bench(num_blocks=16)
    b.add("ana", [*SYSTEM, *ANA, 9], max_tokens=1)
    b.run()
    b.now = 1.0
    b.add("bob", [*SYSTEM, *BOB, 9], max_tokens=1)
    b.run()
    b.now = 5.0
    return b


def tree(b, limit: int = 10) -> PrefixTree:
    return prefix_tree(b.blocks.prefix_cache, b.blocks.pool, limit)


def named(runs: list[PrefixRun], value: Callable[[PrefixRun], object]) -> dict[int, object]:
    """A value of each run, by its first token."""
    return {run.token_ids[0]: value(run) for run in runs}


def test_a_chain_without_a_branch_is_one_run_and_its_branches_are_runs_that_continue_it(b) -> None:
    runs = tree(b).runs
    assert named(runs, lambda run: (run.depth, run.num_blocks)) == {1: (0, 2), 5: (2, 1), 3: (2, 2)}
    assert [run.parent for run in runs] == [None, runs[0].digest, runs[0].digest]


def test_the_most_recently_used_comes_first_and_says_how_long_ago(b) -> None:
    runs = tree(b).runs
    assert [run.token_ids[0] for run in runs] == [1, 5, 3]
    assert named(runs, lambda run: run.last_use_s) == {1: 4.0, 5: 4.0, 3: 5.0}


def test_a_hit_counts_for_every_block_that_it_took(b) -> None:
    assert named(tree(b).runs, lambda run: run.num_hits) == {1: 1, 5: 0, 3: 0}


def test_a_sequence_that_resumes_after_a_preemption_is_no_further_hit(bench) -> None:
    b = bench(num_blocks=16, max_num_seqs=1)
    b.add("low", [*SYSTEM, 9], max_tokens=3)
    b.step()
    b.add("urgent", [7], max_tokens=1, priority=100)
    b.run()
    assert b.finished["low", 0]
    assert named(tree(b).runs, lambda run: run.num_hits) == {1: 0}


def test_a_run_in_use_is_used_and_one_that_is_used_in_part_is_mixed(b) -> None:
    b.add("now", [*SYSTEM, *ANA[:4], 8], max_tokens=2)
    b.step()
    states = named(tree(b).runs, lambda run: run.state)
    assert states == {1: "used", 3: "mixed", 5: "cached"}
    assert named(tree(b).runs, lambda run: run.last_use_s)[1] == 0.0


def test_callers_do_not_share_a_run_and_each_is_named(bench) -> None:
    b = bench(num_blocks=16)
    for user in ("uid:1", "uid:2"):
        b.add(user, [*SYSTEM, 9], max_tokens=1, extras=(("caller", user),))
    b.run()
    assert sorted(run.extras for run in tree(b).runs) == [(("caller", "uid:1"),), (("caller", "uid:2"),)]


@pytest.mark.parametrize(("limit", "is_cut"), [(1, True), (2, True), (3, False)])
def test_the_tree_has_at_most_as_many_runs_as_were_asked_for_and_counts_all_blocks(b, limit: int, is_cut: bool) -> None:
    found = tree(b, limit)
    assert (len(found.runs), found.is_cut, found.num_blocks) == (limit, is_cut, 5)


def test_evicting_a_branch_frees_it_and_leaves_the_others(b) -> None:
    head = b.blocks.prefix_cache.under(named(tree(b).runs, lambda run: run.digest)[3])
    assert b.blocks.evict(head.digest) == (2, 0, 0, 0)
    assert named(tree(b).runs, lambda run: run.num_blocks) == {1: 3}  # system and Bob are one run now
    b.scheduler.check_integrity()
    assert b.blocks.pool.num_free == 16 - 3
    b.add("again", [*SYSTEM, *ANA, 9], max_tokens=1)
    b.run()
    assert b.num_cached("again") == len(SYSTEM)


def test_evicting_a_root_frees_all_that_continues_it_but_for_what_is_used(b) -> None:
    b.add("now", [*SYSTEM, *ANA[:4], 8], max_tokens=2)
    b.step()
    head = b.blocks.prefix_cache.under(tree(b).runs[0].digest)
    assert b.blocks.evict(head.digest) == (2, 3, 0, 0)  # Bob's block and Ana's second go
    b.scheduler.check_integrity()
    b.run()
    assert b.finished["now", 0]


def test_a_block_that_was_taken_for_other_tokens_leaves_the_tree(bench) -> None:
    b = bench(num_blocks=4)
    b.add("old", [*SYSTEM, 9], max_tokens=1)
    b.run()
    b.add("new", [6] * 12, max_tokens=1)
    b.run()
    assert b.blocks.evictions_total == 1
    assert named(tree(b).runs, lambda run: run.num_blocks) == {1: 1, 6: 3}
