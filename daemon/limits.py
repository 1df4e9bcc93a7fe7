"""What the fields of a request may hold: every range in one table, for ZeroMQ and HTTP alike.

Owns ranges, their meanings and their refusals. `docs/api.md` prints `LIMITS` and the tests walk over it. Which of them
a message is checked against, and what depends on several fields or on the model, is `admission.py`'s.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedd.client.errors import PageddError

# Below this a softmax in float32 is one-hot up to rounding, and dividing by it would overflow.
GREEDY_TEMPERATURE = 1e-4
# Of one request, all its answers together: some MiB while they are kept, tens of MiB as JSON.
MAX_LOGPROBS = 1 << 18
_MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limit:
    """The range of one field. A limit on numbers holds for each number of a list, and for each value of a mapping.

    Attributes:
        field: its name on the wire, the same in both APIs.
        low, high: inclusive, unless `low_is_open`.
        min_items, max_items: of a list or mapping.
        max_chars: of a text, or of each text of a list; a text is never empty.
        in_vocabulary: the numbers (or a mapping's keys) are token ids of the model.
    """

    field: str
    meaning: str
    low: float | None = None
    high: float | None = None
    low_is_open: bool = False
    min_items: int = 0
    max_items: int | None = None
    max_chars: int | None = None
    in_vocabulary: bool = False

    @property
    def range(self) -> str:
        """For people: `(0, 1]`, `>= 1`, `at most 16 items, each of 1 to 256 characters`."""
        parts = []
        if self.min_items:
            parts.append(f"at least {self.min_items} item")
        if self.max_items is not None:
            parts.append(f"at most {self.max_items} items")
        if self.max_chars is not None:
            each = "each of " if self.max_items is not None else ""
            parts.append(f"{each}1 to {self.max_chars} characters")
        if self.in_vocabulary:
            parts.append("token ids of the model")
        if self.low is not None and self.high is not None:
            values = "values in " if self.max_items is not None else ""
            parts.append(f"{values}{'(' if self.low_is_open else '['}{self.low}, {self.high}]")
        elif self.low is not None:
            parts.append(f"{'>' if self.low_is_open else '>='} {self.low}")
        return ", ".join(parts)

    def check(self, value: Any) -> None:
        """Raises `PageddError("invalid_value")` naming field, value and range. `None` is always allowed: not given."""
        match value:
            case None:
                return
            case str():
                if not value or (self.max_chars is not None and len(value) > self.max_chars):
                    self._refuse(f"a text of {len(value)} characters")
            case int() | float():
                if not self._holds(value):
                    self._refuse(value)
            case list() | dict():
                self.check_num_items(len(value))
                for item in value.values() if isinstance(value, dict) else value:
                    self.check(item)

    def check_num_items(self, num_items: int) -> None:
        """Raises `PageddError("invalid_value")`, as `check` would for a list or mapping of so many."""
        if num_items < self.min_items or (self.max_items is not None and num_items > self.max_items):
            self._refuse(f"{num_items} items")

    def _holds(self, number: float) -> bool:
        if isinstance(number, float) and not math.isfinite(number):
            return False
        if self.low is not None and (number < self.low or (self.low_is_open and number == self.low)):
            return False
        return self.high is None or number <= self.high

    def _refuse(self, value: object) -> None:
        # JSON's integers have any length, and Python refuses to write down the longest.
        shown = "a number of over 20 digits" if isinstance(value, int) and abs(value) > 10**20 else value
        raise PageddError("invalid_value", f"{self.field} = {shown}; accepted: {self.range}", field=self.field)


SAMPLING = (
    Limit(
        "max_tokens",
        "Most tokens to produce. Absent: 16 for a completion, the rest of the context for a chat; less if less fits. "
        "A value that does not fit beside the prompt is refused, not cut.",
        low=1,
        high=_MAX_INT,
    ),
    Limit(
        "min_tokens",
        "Neither a stop id nor a stop string ends the text before; at most `max_tokens`.",
        low=0,
        high=_MAX_INT,
    ),
    Limit("n", "Choices. They share the prompt's blocks.", low=1, high=128),
    Limit(
        "temperature",
        f"Divides the logits. 0, and anything below {GREEDY_TEMPERATURE}, is greedy: ties go to the lowest id.",
        low=0,
        high=100,
    ),
    Limit(
        "top_k",
        "Keep the k most likely tokens. 0 and -1 keep all; more than the vocabulary keeps all.",
        low=-1,
        high=_MAX_INT,
    ),
    Limit(
        "top_p",
        "Keep the smallest set of tokens whose probability reaches it. 1 is off.",
        low=0,
        high=1,
        low_is_open=True,
    ),
    Limit("min_p", "Keep tokens at least this fraction as likely as the likeliest. 0 is off.", low=0, high=1),
    Limit(
        "repetition_penalty",
        "Divides positive, multiplies negative logits of tokens in prompt or output. 1 is off.",
        low=0,
        high=10,
        low_is_open=True,
    ),
    Limit("presence_penalty", "Subtracted from the logit of each token in the output.", low=-2, high=2),
    Limit("frequency_penalty", "Subtracted from a token's logit once per occurrence in the output.", low=-2, high=2),
    Limit(
        "logit_bias",
        "Token id (as a string) to what is added to its logit.",
        low=-100,
        high=100,
        max_items=1024,
        in_vocabulary=True,
    ),
    Limit(
        "logprobs",
        "0 gives the chosen token's log-probability, k the k best as well; with all prompts, `n` and `max_tokens` "
        f"{MAX_LOGPROBS} at most.",
        low=0,
        high=20,
    ),
    Limit(
        "seed",
        "The same seed draws the same from the same logits; see Repeatable answers. Absent: one is drawn.",
        low=-(2**63),
        high=2**63 - 1,
    ),
    Limit("stop", "Texts that end the answer; they are not part of it.", max_items=16, max_chars=256),
    Limit("stop_token_ids", "Token ids that end the answer.", max_items=1024, in_vocabulary=True),
)
PRIORITY = Limit("priority", "Higher is more urgent; the default is 0.", low=-100, high=100)
CACHE_SALT = Limit("cache_salt", "Only requests with the same salt (and caller) share cached prefixes.", max_chars=256)
MESSAGES = Limit("messages", "The conversation, oldest first.", min_items=1, max_items=16_384)
CONTENT = Limit("messages.content", "A message's text; over HTTP also a list of text parts.", max_chars=8 << 20)
ROLE = Limit("messages.role", "As the model's chat template knows it.", max_chars=64)

LIMITS: Mapping[str, Limit] = {
    limit.field: limit for limit in (*SAMPLING, PRIORITY, CACHE_SALT, MESSAGES, ROLE, CONTENT)
}
