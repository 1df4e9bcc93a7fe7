"""Prometheus metrics: vLLM's names, so that existing dashboards work, and `pagedd:` ones for what no peer has.

Owns a private registry. Histograms are observed here as requests go by; the engine's own counters are mirrored at each
scrape and go on counting when the engine process is restarted. The figures are defined in `engine/stats.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from pagedd.daemon.latency import LatencyWindow
from pagedd.engine.info import EngineInfo
from pagedd.engine.kv.quality import KVQuality
from pagedd.engine.request import SequenceOutput
from pagedd.engine.stats import EngineStats, TierStats

# A time of creation beside every counter and histogram would double what Prometheus stores, and nobody reads it.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0,
)  # fmt: skip
_TOKENS = tuple(float(2**power) for power in range(18))

# EngineStats attribute -> (metric, help). Counters of one engine process.
_ENGINE_COUNTERS = {
    "preemptions_total": ("vllm:num_preemptions", "Sequences that lost their blocks to others."),
    "prefix_queries_total": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits_total": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "prompt_tokens_total": ("vllm:prompt_tokens", "Prompt tokens processed."),
    "generation_tokens_total": ("vllm:generation_tokens", "Tokens produced."),
    "recomputed_tokens_total": ("pagedd:recomputed_tokens", "Tokens computed again after a preemption."),
    "evictions_total": ("pagedd:evictions", "Cached blocks that were taken for something else."),
    "steps_total": ("pagedd:steps", "Steps of the engine."),
    "integrity_alarms_total": ("pagedd:integrity_alarms", "Times that the bookkeeping of KV blocks was found wrong."),
}
_ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float | None]]] = {
    "vllm:num_requests_running": ("Sequences that have a seat.", lambda stats: stats.num_requests_running),
    "vllm:num_requests_waiting": ("Sequences that wait for a seat.", lambda stats: stats.num_requests_waiting),
    "pagedd:num_requests_awaiting_prefix": (
        "Of those, sequences that wait for a prefix which another one is computing.",
        lambda stats: stats.num_requests_awaiting_prefix,
    ),
    "vllm:kv_cache_usage_perc": ("Used KV blocks over all, 0 to 1.", lambda stats: stats.kv_usage),
    "pagedd:num_blocks_used": ("KV blocks that a live sequence names.", lambda stats: stats.num_blocks_used),
    "pagedd:kv_slot_fill_ratio": ("Live tokens over the slots of used blocks.", lambda stats: stats.slot_fill),
    "pagedd:fragmentation_ratio": ("1 - slot fill.", lambda stats: stats.fragmentation),
    "pagedd:contiguous_fragmentation_ratio": (
        "What one slab of max_model_len a sequence would waste for the same tokens.",
        lambda stats: stats.contiguous_fragmentation,
    ),
    "pagedd:token_budget": (
        "Tokens of chunks and guesses that a step may hold now; fewer than configured after memory ran out.",
        lambda stats: stats.token_budget,
    ),
    "pagedd:oldest_wait_seconds": ("How long the first in the queue has waited.", lambda stats: stats.oldest_wait_s),
    "pagedd:batch_occupancy_ratio": (
        "Running sequences over seats.",
        lambda stats: stats.num_requests_running / stats.max_num_seqs if stats.max_num_seqs else None,
    ),
    "pagedd:token_budget_ratio": (
        "Scheduled tokens of the last step over the token budget.",
        lambda stats: (
            stats.num_scheduled_tokens / stats.max_num_batched_tokens if stats.max_num_batched_tokens else None
        ),
    ),
}
# TierStats attribute -> (metric, help), of each tier there is.
_TIER_COUNTERS = {
    "hits_total": ("pagedd:kv_tier_hits", "KV blocks that were looked up and found in a tier."),
    "promotions_total": ("pagedd:kv_tier_promotions", "KV blocks copied from a tier into the pool."),
    "stored_total": ("pagedd:kv_tier_stored", "KV blocks that came into a tier."),
    "evictions_total": ("pagedd:kv_tier_evictions", "KV blocks that left a tier for others."),
    "read_bytes_total": ("pagedd:kv_tier_read_bytes", "Bytes copied out of a tier."),
    "written_bytes_total": ("pagedd:kv_tier_written_bytes", "Bytes copied into a tier."),
    "read_seconds_total": ("pagedd:kv_tier_read_seconds", "Time in copies out of a tier."),
    "write_seconds_total": ("pagedd:kv_tier_write_seconds", "Time in copies into a tier."),
}
_TIER_GAUGES = {
    "num_blocks": ("pagedd:kv_tier_blocks", "KV blocks in a tier."),
    "num_bytes": ("pagedd:kv_tier_bytes", "Bytes that a tier takes."),
    "max_bytes": ("pagedd:kv_tier_max_bytes", "Bytes that a tier may take."),
}


@dataclass(slots=True, eq=False)
class RequestTimes:
    """When things happened to one request, seconds of the monotonic clock. Mutated only by `Metrics`.

    Attributes:
        queue_s: from the engine's acceptance until its first chunk was scheduled, as the engine says it.
        last_token_s: per choice.
    """

    arrival_s: float
    last_token_s: dict[int, float]
    first_token_s: float | None = None
    queue_s: float | None = None


class Metrics:
    """Counts what the service sees. One for each daemon; tests make their own.

    Attributes:
        registry: what the event loop knows.
        machine_registry: what drivers have to be asked for.
    """

    def __init__(self, engine: "EngineCollector") -> None:
        self.registry = CollectorRegistry()
        self.machine_registry = CollectorRegistry()
        self.registry.register(engine)
        self._engine = engine
        self._steps_seen = 0
        self._recent_first_token = LatencyWindow()
        self._recent_inter_token = LatencyWindow()
        self._success = Counter(
            "vllm:request_success", "Finished requests.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._refused = Counter(
            "pagedd:request_errors", "Requests that ended in an error.", ["model_name", "code"], registry=self.registry
        )
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self._inter_token = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens.", _SECONDS)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", _SECONDS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Waiting in the engine's queue.", _SECONDS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "End of waiting to first token.", _SECONDS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First token to end.", _SECONDS)
        self._prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self._output_tokens = self._histogram("vllm:request_generation_tokens", "Output tokens a request.", _TOKENS)
        self._iteration = self._histogram("vllm:iteration_tokens_total", "Tokens scheduled in a step.", _TOKENS)

    def render(self) -> bytes:
        """The text that Prometheus reads; its type is `CONTENT_TYPE`."""
        return prometheus_client.generate_latest(self.registry)

    def render_machine(self) -> bytes:
        """More of that text; for a thread, because a driver may take its time."""
        return prometheus_client.generate_latest(self.machine_registry)

    def recent_latencies(self) -> dict[str, float | None]:
        """Percentiles of the last minute, in s, for the stats frames; None when nothing was observed."""
        return {
            "first_token_seconds_p50": self._recent_first_token.percentile(0.5),
            "first_token_seconds_p95": self._recent_first_token.percentile(0.95),
            "inter_token_seconds_p50": self._recent_inter_token.percentile(0.5),
            "inter_token_seconds_p99": self._recent_inter_token.percentile(0.99),
        }

    def produced(self, times: RequestTimes, output: SequenceOutput, now_s: float) -> None:
        """A step gave `output` to the request of `times`."""
        if not output.token_ids:
            return
        model = self._engine.model_name
        if output.queue_s is not None and times.queue_s is None:
            times.queue_s = output.queue_s
        if times.first_token_s is None:
            times.first_token_s = now_s
            self._first_token.labels(model).observe(now_s - times.arrival_s)
            self._recent_first_token.observe(now_s - times.arrival_s)
        last_s = times.last_token_s.get(output.choice_index)
        if last_s is not None:
            # Several tokens of one step arrive together; the gap is shared so that its sum stays the time that passed.
            gap_s = (now_s - last_s) / len(output.token_ids)
            for _ in output.token_ids:
                self._inter_token.labels(model).observe(gap_s)
            self._recent_inter_token.observe(gap_s, len(output.token_ids))
        times.last_token_s[output.choice_index] = now_s

    def stepped(self, stats: EngineStats) -> None:
        """The engine reported; `stats` are its newest."""
        # An abort has the engine report too, without a step.
        if stats.steps_total != self._steps_seen and stats.num_scheduled_tokens:
            self._steps_seen = stats.steps_total
            self._iteration.labels(self._engine.model_name).observe(stats.num_scheduled_tokens)

    def finished(
        self, times: RequestTimes, outcome: str, num_prompt_tokens: int, num_output_tokens: int, now_s: float
    ) -> None:
        """A request that was admitted came to its end, `outcome` is its finish reason."""
        model = self._engine.model_name
        self._success.labels(model, outcome).inc()
        self._e2e.labels(model).observe(now_s - times.arrival_s)
        self._prompt_tokens.labels(model).observe(num_prompt_tokens)
        self._output_tokens.labels(model).observe(num_output_tokens)
        if times.first_token_s is None:
            return
        self._decode.labels(model).observe(now_s - times.first_token_s)
        if times.queue_s is not None:
            self._queue.labels(model).observe(times.queue_s)
            self._prefill.labels(model).observe(max(0.0, times.first_token_s - times.arrival_s - times.queue_s))

    def failed(self, code: str) -> None:
        """A message was refused, or its request broke."""
        self._refused.labels(self._engine.model_name, code).inc()

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_text, ["model_name"], buckets=buckets, registry=self.registry)


class EngineCollector(Collector):
    """Reads the engine's last statistics whenever Prometheus asks.

    Counters of an engine process that ended are added to those of the next, so that none ever falls.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        info: Callable[[], EngineInfo | None],
        has_fallen_back: Callable[[], bool],
    ) -> None:
        self.model_name = ""
        self._has_fallen_back = has_fallen_back
        self._stats = stats
        self._info = info
        self._ended: dict[str, float] = {}
        self._ended_parts: dict[str, float] = {}
        self._ended_tiers: dict[str, dict[str, float]] = {}
        self._num_restarts = 0

    def engine_lost(self) -> None:
        """The engine process ended and its last statistics are still to be had; what it had counted is kept."""
        self._num_restarts += 1
        if (last := self._stats()) is None:
            return
        for name in _ENGINE_COUNTERS:
            self._ended[name] = self._ended.get(name, 0) + getattr(last, name)
        for part, seconds in last.step_seconds.items():
            self._ended_parts[part] = self._ended_parts.get(part, 0.0) + seconds
        for tier, numbers in last.kv_tiers.items():
            ended = self._ended_tiers.setdefault(tier, dict.fromkeys(_TIER_COUNTERS, 0))
            for name in _TIER_COUNTERS:
                ended[name] += getattr(numbers, name)

    def collect(self) -> Iterator[Metric]:
        labels, model = ["model_name"], [self.model_name]
        restarts = CounterMetricFamily(
            "pagedd:engine_restarts", "Engine processes that ended by themselves.", labels=labels
        )
        restarts.add_metric(model, self._num_restarts)
        yield restarts
        fallback = GaugeMetricFamily(
            "pagedd:device_fallback", "1 while the CPU serves in place of the configured device.", labels=labels
        )
        fallback.add_metric(model, self._has_fallen_back())
        yield fallback
        stats = self._stats()
        for attribute, (name, text) in _ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            now = getattr(stats, attribute) if stats is not None else 0
            counter.add_metric(model, self._ended.get(attribute, 0) + now)
            yield counter
        if stats is not None:
            yield from self._gauges(stats)
            if stats.kv_tiers:
                yield from self._tiers(stats.kv_tiers)
        if (info := self._info()) is not None:
            yield self._cache_config(info)
            if info.kv_quality is not None:
                yield self._quality(info.kv_quality)

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering does not collect before there is an engine."""
        return iter(())

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        labels, model = ["model_name"], [self.model_name]
        for name, (text, value_of) in _ENGINE_GAUGES.items():
            # "Not available" is no sample; a zero would be a lie.
            if (value := value_of(stats)) is not None:
                gauge = GaugeMetricFamily(name, text, labels=labels)
                gauge.add_metric(model, value)
                yield gauge
        blocks = GaugeMetricFamily("pagedd:kv_blocks", "KV blocks by state.", labels=[*labels, "state"])
        blocks.add_metric([*model, "free"], stats.num_blocks_free)
        blocks.add_metric([*model, "cached"], stats.num_blocks_cached)
        blocks.add_metric([*model, "used"], stats.num_blocks_used)
        yield blocks
        parts = SummaryMetricFamily("pagedd:step_seconds", "Time in each part of the steps.", labels=[*labels, "part"])
        steps = int(self._ended.get("steps_total", 0) + stats.steps_total)
        for part, seconds in stats.step_seconds.items():
            parts.add_metric([*model, part], steps, self._ended_parts.get(part, 0.0) + seconds)
        yield parts

    def _tiers(self, tiers: dict[str, TierStats]) -> Iterator[Metric]:
        labels = ["model_name", "tier"]
        for attribute, (name, text) in _TIER_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for tier, numbers in tiers.items():
                gauge.add_metric([self.model_name, tier], getattr(numbers, attribute))
            yield gauge
        for attribute, (name, text) in _TIER_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for tier, numbers in tiers.items():
                ended = self._ended_tiers.get(tier, {}).get(attribute, 0)
                counter.add_metric([self.model_name, tier], ended + getattr(numbers, attribute))
            yield counter

    def _quality(self, quality: KVQuality) -> Metric:
        text = "The quantized KV cache beside 16 bits, at load: share of equal top tokens, KL divergence in nats."
        gauge = GaugeMetricFamily("pagedd:kv_quality", text, labels=["model_name", "measure"])
        gauge.add_metric([self.model_name, "agreement"], quality.agreement)
        gauge.add_metric([self.model_name, "divergence_nats"], quality.divergence_nats)
        return gauge

    def _cache_config(self, info: EngineInfo) -> Metric:
        values = {
            "model_name": self.model_name,
            "block_size": info.block_size,
            "cache_dtype": info.kv_cache_dtype,
            "num_gpu_blocks": info.num_blocks,
            "kv_bytes_per_token": info.kv_bytes_per_token,
            "kv_open_bytes": info.kv_open_bytes,
            "device": info.device,
        }
        # A gauge that is always 1, as vLLM writes it; its labels are the information.
        config = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's settings.", labels=list(values))
        config.add_metric([str(value) for value in values.values()], 1)
        return config
