"""How good a quantized cache has to be, and how good one was found to be. No torch, so that the front reads it.

What finds it out is `engine/kv_quality_check.py`.
"""

import math
from dataclasses import dataclass

# Top-1 agreement with a cache of 16 bits on the shipped text, under which a form is worse than it is known to be. The
# default model reaches 0.960, 0.940, 0.936 and 0.932, beside products with 8-bit inputs, which turn a small change of
# the cache into a larger one. Two hundredths, twice the error of a share of so few tokens, are left to chance and to
# other models; three where keys and values are both in 4 bits.
AGREEMENT_BARS = {"int8": 0.94, "fp8": 0.92, "k8v4": 0.91, "int4": 0.90}
# What to use in the place of a form that is not good enough.
LARGER_FORM = {"int4": "int8", "k8v4": "int8", "fp8": "int8", "int8": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVQuality:
    """What the cache's form changed in the model's predictions of one text.

    Attributes:
        agreement: share of positions, 0–1, whose most likely token is the one that a cache of 16 bits gives.
        divergence_nats: mean KL divergence of the predictions from those over 16 bits.
        num_tokens: positions that were compared.
    """

    form: str
    agreement: float
    divergence_nats: float
    num_tokens: int

    @property
    def bar(self) -> float:
        return AGREEMENT_BARS[self.form]

    @property
    def is_good(self) -> bool:
        # Predictions that are no numbers have no most likely token that could differ.
        return self.agreement >= self.bar and math.isfinite(self.divergence_nats)

    def describe(self) -> str:
        return (
            f"{self.form} agrees with 16 bits in {100 * self.agreement:.1f} % of {self.num_tokens} tokens, "
            f"{100 * self.bar:.0f} % are usual; divergence {self.divergence_nats:.4f} nats"
        )
