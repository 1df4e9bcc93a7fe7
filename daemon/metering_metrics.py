"""Usage, quotas and costs for Prometheus. Series of a caller are as many as there are accounts (`MAX_ACCOUNTS`)."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagedd.daemon.metering import Metering


class MeteringCollector(Collector):
    """Reads the accounts whenever Prometheus asks. "Not known" is no sample."""

    def __init__(self, metering: Metering) -> None:
        self._metering = metering

    def collect(self) -> Iterator[Metric]:
        yield from self._callers()
        yield from self._costs()

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering reads nothing."""
        return iter(())

    def _callers(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("pagedd:caller_requests", "Requests taken.", labels=["caller"])
        tokens = CounterMetricFamily(
            "pagedd:caller_tokens", "Tokens: of prompts, cached ones of these, of output.", labels=["caller", "kind"]
        )
        refusals = CounterMetricFamily(
            "pagedd:caller_refusals", "Requests refused for a caller's quota.", labels=["caller", "limit"]
        )
        in_flight = GaugeMetricFamily("pagedd:caller_requests_in_flight", "Live choices.", labels=["caller"])
        joules = CounterMetricFamily(
            "pagedd:caller_energy_joules", "A caller's share; see daemon/cost.py.", labels=["caller", "kind"]
        )
        for account in self._metering.accounts:
            name, spent = account.name, account.spent
            requests.add_metric([name], account.num_requests)
            in_flight.add_metric([name], account.allowance.num_choices)
            tokens.add_metric([name, "prompt"], spent.prompt_tokens)
            tokens.add_metric([name, "cached"], spent.cached_tokens)
            tokens.add_metric([name, "output"], spent.output_tokens)
            for limit, number in account.refusals.items():
                refusals.add_metric([name, limit], number)
            if self._metering.costs.energy_source:
                joules.add_metric([name, "prompt"], spent.prompt_joules)
                joules.add_metric([name, "output"], spent.output_joules)
        yield from (requests, in_flight, tokens, refusals, joules)

    def _costs(self) -> Iterator[Metric]:
        costs = self._metering.costs
        total = CounterMetricFamily("pagedd:energy_joules", "What the box used; see daemon/cost.py.", labels=["source"])
        if (joules := costs.energy_joules) is not None:
            total.add_metric([costs.energy_source], joules)
        per_token = GaugeMetricFamily(
            "pagedd:energy_joules_per_token", "See daemon/cost.py; over the last minute, or the start.", labels=_LABELS
        )
        per_million = GaugeMetricFamily(
            "pagedd:cost_per_million_tokens", "Money; see daemon/cost.py; as above.", labels=_LABELS
        )
        for over, cost in (("minute", costs.last_minute()), ("start", costs.since_start())):
            for family, kind, value in (
                (per_token, "all", cost.joules_per_token),
                (per_token, "prompt", cost.joules_per_prompt_token),
                (per_token, "output", cost.joules_per_output_token),
                (per_million, "prompt", cost.money_per_million_prompt_tokens),
                (per_million, "output", cost.money_per_million_output_tokens),
            ):
                if value is not None:
                    family.add_metric([kind, over], value)
        yield from (total, per_token, per_million)


_LABELS = ["kind", "over"]
