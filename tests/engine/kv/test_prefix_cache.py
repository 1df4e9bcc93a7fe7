"""The index alone: content is believed only when tokens and parent agree."""

from pagedd.engine.kv.prefix_cache import PrefixCache


def test_a_block_is_found_under_its_tokens_and_parent_only() -> None:
    cache = PrefixCache()
    root = cache.root_digest(())
    digest = cache.block_digest(root, [1, 2])
    first, _ = cache.insert(digest, None, (1, 2), 7)
    assert cache.find(digest, None, (1, 2)) is first
    assert cache.find(digest, None, (1, 3)) is None
    assert cache.find(digest, first, (1, 2)) is None


def test_equal_content_keeps_the_first_block() -> None:
    cache = PrefixCache()
    digest = cache.block_digest(cache.root_digest(()), [1, 2])
    first, _ = cache.insert(digest, None, (1, 2), 7)
    again, displaced = cache.insert(digest, None, (1, 2), 8)
    assert again is first
    assert displaced is None
    assert 7 in cache
    assert 8 not in cache


def test_a_colliding_digest_displaces_the_older_block() -> None:
    cache = PrefixCache(hasher=lambda data: b"same")
    cache.insert(b"same", None, (1, 2), 7)
    entry, displaced = cache.insert(b"same", None, (3, 4), 8)
    assert (entry.block_id, displaced) == (8, 7)
    assert 7 not in cache
    assert len(cache) == 1


def test_forgetting_twice_is_told() -> None:
    cache = PrefixCache()
    digest = cache.block_digest(cache.root_digest(()), [1])
    cache.insert(digest, None, (1,), 3)
    assert cache.forget(3)
    assert not cache.forget(3)
    assert cache.find(digest, None, (1,)) is None


def test_tags_values_and_their_borders_all_count() -> None:
    cache = PrefixCache()
    roots = {
        cache.root_digest(extras)
        for extras in (
            (),
            (("salt", "A"),),
            (("adapter", "A"),),
            (("salt", "A"), ("adapter", "A")),
            (("sal", "tA"),),
            (("salt", ""), ("A", "")),
            (("uid", "1"),),
            (("uid", "2"),),
        )
    }
    assert len(roots) == 8


def test_the_namespace_is_part_of_every_chain() -> None:
    assert PrefixCache((("dtype", "bf16"),)).root_digest(()) != PrefixCache((("dtype", "int8"),)).root_digest(())
