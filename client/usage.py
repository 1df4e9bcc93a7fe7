"""What `pagectl usage` and `pagectl cost` show: who used how much, and what it cost. `daemon/cost.py` defines costs."""

import msgspec


class Cost(msgspec.Struct, kw_only=True):
    """What the tokens of one span of time took. `None` is "not known". Money is in the currency of the settings.

    Attributes:
        seconds: length of the span.
        prompt_tokens: of prompts that were computed, with `cached_tokens` found in the prefix cache.
        joules: the box's, while it computed them.
    """

    seconds: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    joules: float | None = None
    joules_per_token: float | None = None
    joules_per_prompt_token: float | None = None
    joules_per_output_token: float | None = None
    money: float | None = None
    money_per_million_prompt_tokens: float | None = None
    money_per_million_output_tokens: float | None = None


class CallerUsage(msgspec.Struct, kw_only=True):
    """One caller: a user, an API key, or `others` where the table is full. Limits are None where there are none.

    Attributes:
        num_requests: taken since the daemon started.
        num_in_flight: choices of live requests; they hold `num_tokens_in_flight`, prompts and most output.
        tokens_left: of `tokens_per_minute`, now; less than 0 after a limit was lowered.
        refusals: by limit: `requests`, `tokens`, `kv`, `priority`.
    """

    caller: str
    num_requests: int
    num_in_flight: int
    num_tokens_in_flight: int
    refusals: dict[str, int]
    last_minute: Cost
    since_start: Cost
    max_requests: int | None = None
    tokens_per_minute: int | None = None
    tokens_left: float | None = None
    kv_share: float | None = None
    weight: float = 1.0
