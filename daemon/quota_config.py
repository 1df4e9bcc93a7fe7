"""The settings of `[quota]`: what one caller may have at once and in a minute, for everybody and for some by name."""

import pwd
from collections.abc import Mapping
from dataclasses import dataclass

from pagedd.client.errors import PageddError
from pagedd.daemon.setting import setting, subtables

_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """Of one caller. None is no limit."""

    max_requests: int | None = setting(
        None,
        "Requests of one caller in flight, each choice (n) counted; more are refused with 429.",
        minimum=1,
        maximum=_MAX_COUNT,
        none="unlimited",
    )
    tokens_per_minute: int | None = setting(
        None,
        "Tokens of prompt and output that one caller may use in a minute.",
        minimum=1,
        maximum=_MAX_COUNT,
        none="unlimited",
    )
    kv_share: float | None = setting(
        None,
        "Share of the KV pool that one caller's requests in flight may ask for, prompts and most output.",
        above=0,
        maximum=1,
        none="unlimited",
    )
    max_priority: int = setting(100, "Highest priority that one caller may ask for.", minimum=-100, maximum=100)
    weight: float = setting(
        1.0, "Turns of one caller for each turn of another when both wait.", minimum=0.01, maximum=100
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaConfig(QuotaLimits):
    """`[quota]` for everybody, `[quota.user.NAME]` and `[quota.key.NAME]` for one."""

    user: Mapping[str, QuotaLimits] = subtables(
        QuotaLimits, "One Unix user, by name or number; what is left out is as for everybody."
    )
    key: Mapping[str, QuotaLimits] = subtables(
        QuotaLimits, "One API key, by its name in api_key_file; what is left out is as for everybody."
    )

    def __post_init__(self) -> None:
        """Raises `PageddError("invalid_setting")` for a user who does not exist, or who has two tables."""
        self.by_uid()

    def by_uid(self) -> dict[int, QuotaLimits]:
        """The limits of users that have their own."""
        found: dict[int, QuotaLimits] = {}
        for name, limits in self.user.items():
            uid = _uid_of(name)
            if uid in found:
                raise _invalid(name, f"user {uid} has a table already; write one")
            found[uid] = limits
        return found


def _uid_of(name: str) -> int:
    if name.isascii() and name.isdecimal():
        return int(name[:20])
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        raise _invalid(name, "there is no user of that name; write a name or a number of `getent passwd`") from None


def _invalid(name: str, why: str) -> PageddError:
    return PageddError("invalid_setting", f"quota.user.{name}: {why}", field="quota")
