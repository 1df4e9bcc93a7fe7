"""How the engine's time is shared out between prompts and output: what a prompt token and an output token take.

A step's seconds go to prompts and to output by the tokens that it computed for each. A guess counts as output, a prompt
token that is computed again after a preemption as prompt, a cached one not at all.
"""

from dataclasses import dataclass

from pagedd.engine.stats import EngineStats


@dataclass(slots=True)
class EngineTime:
    """Seconds of all steps. Mutated only by `stepped`."""

    prompt_s: float = 0.0
    output_s: float = 0.0
    _seen_s: float = 0.0
    _drafted_seen: int = 0

    @property
    def total_s(self) -> float:
        return self.prompt_s + self.output_s

    def stepped(self, stats: EngineStats, num_decoded: int) -> None:
        """The engine reported. `num_decoded` sequences went on with their output; `stats` are its newest figures."""
        seconds, drafted = sum(stats.step_seconds.values()), stats.drafted_tokens_total
        if stats.num_scheduled_tokens <= 0:
            return
        if seconds < self._seen_s or drafted < self._drafted_seen:
            self._seen_s, self._drafted_seen = 0.0, 0  # another engine, which counts anew
        num_output = min(stats.num_scheduled_tokens, num_decoded + drafted - self._drafted_seen)
        output_s = (seconds - self._seen_s) * num_output / stats.num_scheduled_tokens
        self.output_s += output_s
        self.prompt_s += seconds - self._seen_s - output_s
        self._seen_s, self._drafted_seen = seconds, drafted
