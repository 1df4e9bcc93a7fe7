"""How many tokens a step may compute: as configured, and fewer for a while after the device's memory ran out."""

LEAST_TOKENS = 16
_CALM_STEPS = 256  # after so many steps without a fault the budget is doubled, up to what is configured


class TokenBudget:
    """`tokens` is the budget of the next step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_calm_steps = 0
        self.tokens = most

    def shrink(self, num_tokens: int) -> None:
        """Memory ran out in a step of `num_tokens`: half of that must do."""
        self.tokens = min(self.tokens, max(LEAST_TOKENS, num_tokens // 2))
        self._num_calm_steps = 0

    def note_step(self) -> None:
        """A step came back."""
        if self.tokens == self._most:
            return
        self._num_calm_steps += 1
        if self._num_calm_steps == _CALM_STEPS:
            self.tokens = min(2 * self.tokens, self._most)
            self._num_calm_steps = 0
