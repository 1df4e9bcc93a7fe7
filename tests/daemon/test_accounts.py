"""One account for each caller, in a table of bounded size."""

from pathlib import Path

import pytest

from pagedd.daemon.accounts import MAX_ACCOUNTS, OTHERS, Accounts, Spent
from pagedd.daemon.caller import Caller
from pagedd.daemon.quota import Hold, Need
from pagedd.daemon.quota_config import QuotaConfig, QuotaLimits
from pagedd.daemon.subordinate_ids import SubordinateIds

ANA, BOB, KEY = Caller(uid=1001), Caller(uid=1002), Caller(key_id="laptop")


def test_a_caller_has_one_account_whatever_its_process_or_group() -> None:
    accounts = Accounts(QuotaConfig())
    assert accounts.of(Caller(uid=1001, gid=1, pid=1)) is accounts.of(Caller(uid=1001, gid=2, pid=2))
    assert accounts.of(ANA) is not accounts.of(BOB)


def test_a_user_and_a_key_may_have_limits_of_their_own() -> None:
    own, keys = QuotaLimits(max_requests=2), QuotaLimits(max_requests=3)
    accounts = Accounts(QuotaConfig(max_requests=1, user={"1001": own}, key={"laptop": keys}))
    assert [accounts.of(caller).allowance.limits.max_requests for caller in (ANA, KEY, BOB)] == [2, 3, 1]


def test_other_quotas_reach_accounts_that_are_open() -> None:
    accounts = Accounts(QuotaConfig(max_requests=1))
    ana, bob = accounts.of(ANA), accounts.of(BOB)
    accounts.replace_quotas(QuotaConfig(max_requests=5, user={"1001": QuotaLimits(max_requests=7)}))
    assert (ana.allowance.limits.max_requests, bob.allowance.limits.max_requests) == (7, 5)


def test_a_user_s_containers_are_the_user(tmp_path: Path) -> None:
    (tmp_path / "subuid").write_text("root:100000:65536\n1002:200000:10\ngone-user:300000:10\nnonsense\nroot:x:y\n")
    accounts = Accounts(QuotaConfig(), subordinate_ids=SubordinateIds(tmp_path / "subuid"))
    for uid, owner in ((99_999, 99_999), (100_000, 0), (165_535, 0), (165_536, 165_536), (200_009, 1002)):
        assert accounts.of(Caller(uid=uid)).tag == f"uid:{owner}"
    assert accounts.of(Caller(uid=200_001)) is accounts.of(BOB)
    assert accounts.of(Caller(uid=300_001)).tag == "uid:300001"


@pytest.fixture
def full() -> Accounts:
    """A table without room; the callers are the users 0, 1, 2, …, who have done a request each."""
    accounts = Accounts(QuotaConfig(tokens_per_minute=60), clock=lambda: 0.0)
    for uid in range(MAX_ACCOUNTS):
        account = accounts.of(Caller(uid=uid))
        account.num_requests += 1
        account.produced(uid)
    return accounts


def test_a_flood_of_callers_does_not_grow_the_table(full: Accounts) -> None:
    for uid in range(10_000, 20_000):
        full.of(Caller(uid=uid)).num_requests += 1
    assert len(list(full)) == MAX_ACCOUNTS + 1
    assert sum(account.num_requests for account in full) == MAX_ACCOUNTS + 10_000


def test_the_one_that_was_away_longest_is_forgotten_and_its_tokens_are_not(full: Accounts) -> None:
    full.of(Caller(uid=0))
    full.of(Caller(uid=9999))
    accounts = {account.tag: account for account in full}
    assert "uid:0" in accounts
    assert "uid:1" not in accounts
    assert accounts[OTHERS].spent.output_tokens == 1


def test_nobody_loses_its_debt_in_a_flood(full: Accounts) -> None:
    for account in full:
        account.allowance.hold([(Hold(), Need(1, 60, 60))], 100)
    first, second = full.of(Caller(uid=5000)), full.of(Caller(uid=5001))
    assert first is second
    assert first.tag == OTHERS
    assert full.of(Caller(uid=3)).allowance.tokens_left == 0


def test_what_was_spent_since_is_never_negative() -> None:
    later, earlier = Spent(prompt_tokens=5, prompt_joules=2.0), Spent(prompt_tokens=3, prompt_joules=2.5)
    assert later.since(earlier) == Spent(prompt_tokens=2)
