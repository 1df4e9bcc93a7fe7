"""Advice for Prometheus: 1 for each cause that is given now, 0 for the others, so that alerts have a series."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagedd.client.stats_frame import Advice
from pagedd.daemon.advice import RULES


class AdviceCollector(Collector):
    """Asks for the advice whenever Prometheus asks."""

    def __init__(self, advice: Callable[[], Sequence[Advice]]) -> None:
        self._advice = advice

    def collect(self) -> Iterator[Metric]:
        given = {advice.cause for advice in self._advice()}
        gauge = GaugeMetricFamily("pagedd:advice", "1 while `pagectl doctor` advises a change.", labels=["cause"])
        for cause in RULES:
            gauge.add_metric([cause], cause in given)
        yield gauge

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering reads nothing."""
        return iter(())
