"""What one caller may still have: requests in flight, tokens a minute, a share of the KV pool.

A request holds what it may need (prompt, and `max_tokens` of each choice) from the door until its end, when what it
did not use is given back: nobody gets more by asking for more choices, by leaving `max_tokens` out, or by starting many
at once. Owns the arithmetic and its refusals. Who the callers are is `accounts.py`'s, their limits `quota_config.py`'s.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagedd.client.errors import PageddError
from pagedd.daemon.quota_config import QuotaLimits

# When another of the caller's requests will end is not known; it may be soon.
_BUSY_RETRY_S = 1.0
# Tokens: 0.29 of 1600 is 463.99999999999994 in binary, and a whole block less if it were cut off.
_SHARE_ROUNDING = 1e-6


class TokenBucket:
    """Tokens that may be taken now: it holds a minute's worth, fills in a minute, and begins with `share` of it."""

    def __init__(self, per_minute: int, clock: Callable[[], float], share: float = 1.0) -> None:
        self.capacity = per_minute
        self._clock = clock
        self._level = per_minute * share
        self._filled_s = clock()

    @property
    def level(self) -> float:
        now_s = self._clock()
        self._level = min(self.capacity, self._level + (now_s - self._filled_s) * self.capacity / 60)
        self._filled_s = now_s
        return self._level

    def put(self, num_tokens: float) -> None:
        """Gives back, or takes when negative; what does not fit is lost."""
        self._level = min(self.capacity, self.level + num_tokens)

    def seconds_until(self, num_tokens: float) -> float:
        """How long until so many may be taken, if nobody takes any before; at most `capacity` can ever be."""
        return max(0.0, (num_tokens - self.level) * 60 / self.capacity)


class Need(NamedTuple):
    """What a request may come to need. `num_kv_tokens` is what its tokens take of the pool, in whole blocks."""

    num_choices: int
    num_tokens: int
    num_kv_tokens: int


def need_of(num_prompt_tokens: int, num_choices: int, num_output_tokens: int, block_size: int) -> Need:
    """`num_output_tokens` are those of one choice. Choices share the prompt's full blocks; its tail each one copies.

    The last token drawn is never computed, so it takes nothing of the pool.
    """
    num_shared = num_prompt_tokens // block_size
    num_own = -(-(num_prompt_tokens + num_output_tokens - 1) // block_size) - num_shared
    num_tokens = num_prompt_tokens + num_choices * num_output_tokens
    return Need(num_choices, num_tokens, (num_shared + num_choices * num_own) * block_size)


def least_need_of(num_prompt_tokens: int, num_choices: int, num_output_tokens: int, block_size: int) -> Need:
    """What `need_of` will say at least of a prompt that may turn out longer: one that ends with a block has no tail."""
    without_tail = -(-num_prompt_tokens // block_size) * block_size
    least = need_of(num_prompt_tokens, num_choices, num_output_tokens, block_size)
    longer = need_of(without_tail, num_choices, num_output_tokens, block_size)
    return least._replace(num_kv_tokens=min(least.num_kv_tokens, longer.num_kv_tokens))


@dataclass(slots=True, eq=False)
class Hold:
    """What one live request holds of its caller's quota. Mutated only by `Allowance`.

    Attributes:
        num_kv_tokens: what its tokens take of the pool, in whole blocks.
        num_taken: of its tokens, those that came out of `bucket` and go back there if they are not used.
    """

    num_choices: int = 0
    num_tokens: int = 0
    num_kv_tokens: int = 0
    bucket: TokenBucket | None = None
    num_taken: int = 0


class Allowance:
    """One caller's limits and what its live requests hold of them.

    Args:
        clock: seconds, monotonic; replaceable so that tests decide what time it is.
    """

    def __init__(self, limits: QuotaLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.num_choices = 0
        self.num_tokens = 0
        self.num_kv_tokens = 0  # whole blocks of them
        self._clock = clock
        self._last_bucket: TokenBucket | None = None  # fills up also while there is no limit a minute
        self.replace(limits)

    @property
    def is_untouched(self) -> bool:
        """Whether forgetting it would forget nothing: nothing is held and the bucket is full."""
        bucket = self._last_bucket
        return self.num_choices == 0 and (bucket is None or bucket.level >= bucket.capacity)

    @property
    def tokens_left(self) -> float | None:
        """What may be taken now; None when there is no limit a minute."""
        return None if self._bucket is None else self._bucket.level

    @property
    def _bucket(self) -> TokenBucket | None:
        return None if self.limits.tokens_per_minute is None else self._last_bucket

    def replace(self, limits: QuotaLimits) -> None:
        """Other limits from now on. The share of a minute's tokens that has been used stays used."""
        self.limits, per_minute, last = limits, limits.tokens_per_minute, self._last_bucket
        if per_minute is not None and (last is None or last.capacity != per_minute):
            share_left = 1.0 if last is None else last.level / last.capacity
            self._last_bucket = TokenBucket(per_minute, self._clock, share_left)

    def most_tokens(self, num_choices: int, pool_tokens: int) -> int:
        """The most that one request may ever need, prompt and all output, where the pool's end is a limit too."""
        kv_tokens, per_minute = self._kv_tokens(pool_tokens), self.limits.tokens_per_minute
        most = num_choices + (pool_tokens if kv_tokens is None else kv_tokens)
        return most if per_minute is None else min(most, per_minute)

    def most_output_tokens(
        self, num_prompt_tokens: int, num_choices: int, pool_tokens: int, block_size: int
    ) -> int | None:
        """The most that each choice behind that prompt may ever have, 0 or less for none; None is no limit."""
        limits = []
        if self.limits.tokens_per_minute is not None:
            limits.append((self.limits.tokens_per_minute - num_prompt_tokens) // num_choices)
        if (kv_tokens := self._kv_tokens(pool_tokens)) is not None:
            num_shared = num_prompt_tokens // block_size
            num_own = (kv_tokens // block_size - num_shared) // num_choices
            limits.append((num_shared + num_own) * block_size + 1 - num_prompt_tokens)
        return min(limits, default=None)

    def hold(self, asked: Sequence[tuple[Hold, Need]], pool_tokens: int, *, most_tokens: int | None = None) -> None:
        """Lets each hold have what it needs, all or none; what it has counts towards that.

        `most_tokens` is what they may turn out to be when they are counted, so that nobody comes again too early.
        Raises `PageddError`: `over_quota` with the time after which there is room, `exceeds_quota` when there never is.
        """
        num_choices, num_tokens, num_kv_tokens = (
            sum(column) for column in zip(*(need for _, need in asked), strict=True)
        )
        self._refuse_impossible(num_choices, num_tokens, num_kv_tokens, pool_tokens, most_tokens)
        new_choices = num_choices - sum(hold.num_choices for hold, _ in asked)
        new_tokens = num_tokens - sum(hold.num_tokens for hold, _ in asked)
        new_kv_tokens = num_kv_tokens - sum(hold.num_kv_tokens for hold, _ in asked)
        self._refuse_excess_in_flight(new_choices, new_kv_tokens, num_kv_tokens, pool_tokens)
        self._refuse_excess_in_a_minute(new_tokens, num_tokens, most_tokens)
        for hold, need in asked:
            self._take(hold, need.num_tokens - hold.num_tokens)
            hold.num_choices, hold.num_tokens, hold.num_kv_tokens = need
        self.num_choices += new_choices
        self.num_tokens += new_tokens
        self.num_kv_tokens += new_kv_tokens

    def release(self, hold: Hold, num_used_tokens: int) -> None:
        """The request ended. What it did not use may be used by others; nothing happens the second time."""
        if hold.num_choices:
            self._take(hold, min(0, num_used_tokens - hold.num_tokens))
            self.num_choices -= hold.num_choices
            self.num_tokens -= hold.num_tokens
            self.num_kv_tokens -= hold.num_kv_tokens
            hold.num_choices = hold.num_tokens = hold.num_kv_tokens = 0

    def check_priority(self, priority: int) -> None:
        """Raises `PageddError("exceeds_quota")`."""
        if priority > self.limits.max_priority:
            message = f"priority = {priority}, its caller may have {self.limits.max_priority}; lower it"
            raise QuotaRefusal("exceeds_quota", message, limit="priority", field="priority")

    def _take(self, hold: Hold, num_tokens: int) -> None:
        """Out of the bucket, or back when negative; what was taken before there was this bucket does not go there."""
        if self._bucket is None:
            return
        if hold.bucket is not self._bucket:
            hold.bucket, hold.num_taken = self._bucket, 0
        num_tokens = max(num_tokens, -hold.num_taken)
        hold.num_taken += num_tokens
        self._bucket.put(-num_tokens)

    def _kv_tokens(self, pool_tokens: int) -> int | None:
        share = self.limits.kv_share
        return None if share is None else math.floor(share * pool_tokens + _SHARE_ROUNDING)

    def _refuse_impossible(
        self, num_choices: int, num_tokens: int, num_kv_tokens: int, pool_tokens: int, most_tokens: int | None
    ) -> None:
        shorten = "shorten it, or lower max_tokens"
        for name, limit, needed, what, field in (
            ("requests", self.limits.max_requests, num_choices, "requests in flight, choices counted; send fewer", "n"),
            ("tokens", self.limits.tokens_per_minute, num_tokens, f"tokens a minute; {shorten}", "max_tokens"),
            ("kv", self._kv_tokens(pool_tokens), num_kv_tokens, f"tokens of the KV pool; {shorten}", "max_tokens"),
        ):
            if limit is not None and needed > limit:
                at_least = "at least " if most_tokens is not None and name != "requests" else ""
                message = f"the request needs {at_least}{needed}, its caller may have {limit} {what}"
                raise QuotaRefusal("exceeds_quota", message, limit=name, field=field)

    def _refuse_excess_in_flight(
        self, new_choices: int, new_kv_tokens: int, num_kv_tokens: int, pool_tokens: int
    ) -> None:
        most, kv_tokens = self.limits.max_requests, self._kv_tokens(pool_tokens)
        if most is not None and 0 < new_choices > most - self.num_choices:
            raise _over("requests", f"{self.num_choices} in flight and {new_choices} came, limit {most}", _BUSY_RETRY_S)
        if kv_tokens is not None and 0 < new_kv_tokens > kv_tokens - self.num_kv_tokens:
            others = self.num_kv_tokens - (num_kv_tokens - new_kv_tokens)
            what = f"{others} tokens in flight and {num_kv_tokens} came, limit {kv_tokens} of the KV pool"
            raise _over("kv", what, _BUSY_RETRY_S)

    def _refuse_excess_in_a_minute(self, new_tokens: int, num_tokens: int, most_tokens: int | None) -> None:
        bucket = self._bucket
        if bucket is not None and 0 < new_tokens > bucket.level:
            left = math.floor(bucket.level) + num_tokens - new_tokens
            at_least = "" if most_tokens is None else "at least "
            what = f"{at_least}{num_tokens} tokens needed, {left} left of {bucket.capacity} a minute"
            raise _over("tokens", what, bucket.seconds_until(min(bucket.capacity, most_tokens or new_tokens)))


class QuotaRefusal(PageddError):
    """A caller has no room, now or ever. `limit` is which: `requests`, `tokens` (a minute), `kv` or `priority`.

    `field` is the one of the request to change where it can never have room.
    """

    def __init__(
        self, code: str, message: str, *, limit: str, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(code, message, field=field, retry_after_s=retry_after_s)
        self.limit = limit


def _over(limit: str, what: str, retry_after_s: float) -> QuotaRefusal:
    message = f"{what}; try again in {math.ceil(retry_after_s * 10) / 10:g} s"
    return QuotaRefusal("over_quota", message, limit=limit, retry_after_s=retry_after_s)
