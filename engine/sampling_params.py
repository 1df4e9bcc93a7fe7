"""How one request's tokens are chosen: plain numbers, already validated. No torch, so that the front can build it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated settings of one request. Ranges are those that the front documents and enforces.

    Attributes:
        max_tokens: most tokens to produce, >= 1.
        min_tokens: stop ids get no probability until this many tokens are out.
        temperature: >= 0; 0 is greedy, ties to the lowest id.
        top_k: 0 keeps all, else the k most likely.
        top_p: (0, 1]; the smallest set of tokens whose probability reaches it.
        min_p: [0, 1]; tokens at least this fraction of the most likely one's probability.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens in prompt or output (CTRL,
            Keskar et al. 2019).
        presence_penalty, frequency_penalty: subtracted once, or once per occurrence, for tokens in the output.
        logit_bias: token id -> amount added to its logit.
        num_logprobs: None for none, 0 for the chosen token's, k for the k best as well.
        seed: 64-bit; always set (the front draws one when the caller gives none).
        stop_token_ids: ids that end the sequence: the model's ends of sequence (unless ignored) and the caller's own.
        n: number of choices, sequences that share the prompt's blocks.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1

    @property
    def needs_token_counts(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
