"""Who uses the daemon, and how much: one account for each caller, in a table of bounded size.

Owns the table. An account that holds nothing and has no debt may be forgotten when room is needed; what it had used is
then in the account of the others, where callers for whom there is no room share one quota. A user's subordinate ids are
the user's.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

from pagedd.daemon.caller import Caller, name_of_tag
from pagedd.daemon.fair_share import Turns
from pagedd.daemon.quota import Allowance
from pagedd.daemon.quota_config import QuotaConfig, QuotaLimits
from pagedd.daemon.subordinate_ids import SubordinateIds

# Also the bound on label values in `/metrics`, and on rows of `pagectl usage`.
MAX_ACCOUNTS = 256
# No user and no key is called so.
OTHERS = "(others)"


@dataclass(slots=True)
class Spent:
    """What was used, since the daemon started or in a span of time.

    Attributes:
        prompt_tokens: of prompts that were computed, with `cached_tokens` found in the prefix cache.
        prompt_joules, output_joules, prompt_seconds, output_seconds: shares of the box's energy and of the engine's
            time; see `cost.py`.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prompt_joules: float = 0.0
    output_joules: float = 0.0
    prompt_seconds: float = 0.0
    output_seconds: float = 0.0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the engine had to compute."""
        return self.prompt_tokens - self.cached_tokens

    def copy(self) -> "Spent":
        return Spent(*(getattr(self, item.name) for item in fields(self)))

    def add(self, other: "Spent") -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def since(self, earlier: "Spent") -> "Spent":
        """What was used after `earlier`."""
        pairs = ((getattr(self, item.name), getattr(earlier, item.name)) for item in fields(self))
        return Spent(*(max(0, now - then) for now, then in pairs))


@dataclass(slots=True, eq=False)
class Account:
    """One caller. `unshared` are its tokens of which no energy has been accounted for yet."""

    tag: str
    name: str
    allowance: Allowance
    turns: Turns = field(default_factory=Turns)
    spent: Spent = field(default_factory=Spent)
    unshared: Spent = field(default_factory=Spent)
    num_requests: int = 0
    refusals: dict[str, int] = field(default_factory=dict)

    def computed(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A prompt was computed, but for its cached beginning."""
        for tally in (self.spent, self.unshared):
            tally.prompt_tokens += num_prompt_tokens
            tally.cached_tokens += num_cached_tokens

    def produced(self, num_tokens: int) -> None:
        self.spent.output_tokens += num_tokens
        self.unshared.output_tokens += num_tokens

    def refused(self, limit: str) -> None:
        self.refusals[limit] = self.refusals.get(limit, 0) + 1

    def add(self, other: "Account") -> None:
        """Takes over what `other` has counted."""
        self.spent.add(other.spent)
        self.unshared.add(other.unshared)
        self.num_requests += other.num_requests
        for limit, number in other.refusals.items():
            self.refusals[limit] = self.refusals.get(limit, 0) + number


class Accounts:
    """The accounts, least recently used first.

    Args:
        clock: seconds, monotonic; replaceable so that tests decide what time it is.
        subordinate_ids: this machine's.
    """

    def __init__(
        self,
        quotas: QuotaConfig,
        clock: Callable[[], float] = time.monotonic,
        subordinate_ids: SubordinateIds | None = None,
    ) -> None:
        self._clock = clock
        self._subordinate_ids = SubordinateIds() if subordinate_ids is None else subordinate_ids
        self._quotas = quotas
        self._by_uid = quotas.by_uid()
        self._accounts: dict[str, Account] = {}
        self._others = Account(OTHERS, OTHERS, Allowance(quotas, clock))

    def __iter__(self) -> Iterator[Account]:
        """Every account that has counted something."""
        yield from self._accounts.values()
        if self._others.num_requests or self._others.refusals:
            yield self._others

    def of(self, caller: Caller) -> Account:
        """The account of a caller, opened at its first request."""
        tag = caller.tag if caller.uid is None else f"uid:{self._subordinate_ids.owner(caller.uid)}"
        account = self._accounts.pop(tag, None)
        if account is None:
            if not self._make_room():
                return self._others
            account = Account(tag, name_of_tag(tag), Allowance(self._limits(tag), self._clock))
        self._accounts[tag] = account
        return account

    def replace_quotas(self, quotas: QuotaConfig) -> None:
        """Other limits for everybody from now on; what is held and used stays so."""
        self._quotas, self._by_uid = quotas, quotas.by_uid()
        self._others.allowance.replace(quotas)
        for tag, account in self._accounts.items():
            account.allowance.replace(self._limits(tag))

    def _limits(self, tag: str) -> QuotaLimits:
        kind, _, value = tag.partition(":")
        if kind == "uid":
            return self._by_uid.get(int(value), self._quotas)
        return self._quotas.key.get(value, self._quotas)

    def _make_room(self) -> bool:
        if len(self._accounts) < MAX_ACCOUNTS:
            return True
        oldest = next((account for account in self._accounts.values() if account.allowance.is_untouched), None)
        if oldest is None:
            return False
        del self._accounts[oldest.tag]
        self._others.add(oldest)
        return True
