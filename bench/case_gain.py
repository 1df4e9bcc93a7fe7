"""One figure of a case, as it was published and as it was measured here, without a mechanism and with it."""

from dataclasses import dataclass

from pagedd.bench.report import Cell


@dataclass(frozen=True, slots=True)
class Gain:
    """Pairs are (without the mechanism, with it).

    Attributes:
        target: how many times better it should be at least; None where nothing is asked.
        is_less_better: the gain is how many times smaller the figure became.
    """

    figure: str
    unit: str
    published: tuple[float, float]
    measured: tuple[float, float]
    target: float | None = None
    is_less_better: bool = False

    @property
    def published_gain(self) -> float:
        return self._gain(self.published)

    @property
    def measured_gain(self) -> float:
        return self._gain(self.measured)

    @property
    def is_met(self) -> bool | None:
        return None if self.target is None else self.measured_gain >= self.target

    def row(self) -> dict[str, Cell]:
        """For the table: both pairs and both gains side by side."""
        return {
            "figure": f"{self.figure} ({self.unit})",
            "published": arrow(self.published),
            "gain": f"{self.published_gain:.1f}x",
            "measured": arrow(self.measured),
            "gain here": f"{self.measured_gain:.1f}x",
            "target": "" if self.target is None else f"{self.target:g}x {'met' if self.is_met else 'MISSED'}",
        }

    def derived(self) -> dict[str, Cell]:
        """What follows from the fields, for the JSON."""
        return {
            "published_gain": round(self.published_gain, 2),
            "measured_gain": round(self.measured_gain, 2),
            "is_met": self.is_met,
        }

    def _gain(self, pair: tuple[float, float]) -> float:
        worse, better = pair[::-1] if self.is_less_better else pair
        return better / worse if worse else 0.0


def arrow(pair: tuple[float, float]) -> str:
    """ "8 → 32", three digits each."""
    return " → ".join(f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in pair)
