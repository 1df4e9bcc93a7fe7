"""What the table is made of, without a daemon."""

from pagedd.bench.tiers import END_TOKENS, Prefixes


def test_a_prefix_is_asked_for_with_another_end_every_time_and_alike_in_every_run() -> None:
    prefixes, again = Prefixes(2, 32), Prefixes(2, 32)
    first, second = prefixes.requests(), prefixes.requests()
    for one, other in zip(first, second, strict=True):
        assert one.prompt_token_ids[:32] == other.prompt_token_ids[:32]
        assert one.prompt_token_ids[32:] != other.prompt_token_ids[32:]
        assert len(one.prompt_token_ids) == 32 + END_TOKENS
    assert again.requests() == first
