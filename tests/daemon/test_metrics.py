"""What Prometheus reads: names, values that add up, and counters that never fall."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Failed, Generate, Sampling
from pagedd.daemon.caller import Caller
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.engine_state import EngineState
from pagedd.daemon.metrics import EngineCollector, Metrics, RequestTimes
from pagedd.daemon.service import Service
from pagedd.engine.kv.quality import KVQuality
from pagedd.engine.request import SequenceOutput
from pagedd.engine.stats import TierStats

from .byte_model import write_model
from .scripted_host import ScriptedHost, engine_info, engine_stats
from .waiting import until

# The names of the design's part 6 that have a meaning now.
NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket", "vllm:request_decode_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket", "vllm:iteration_tokens_total_bucket",
    "vllm:cache_config_info", "pagedd:kv_blocks", "pagedd:kv_slot_fill_ratio", "pagedd:fragmentation_ratio",
    "pagedd:step_seconds_sum", "pagedd:num_blocks_used", "pagedd:num_requests_awaiting_prefix",
}  # fmt: skip

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def host() -> ScriptedHost:
    return ScriptedHost()


@pytest.fixture
async def service(host: ScriptedHost, tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(DaemonConfig(), host)
    service.set_model(write_model(tmp_path))
    yield service
    await service.close()


def scrape(metrics: Metrics) -> Samples:
    """Samples by name and labels, `model_name` left out."""
    samples: Samples = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = tuple(sorted(item for item in sample.labels.items() if item[0] != "model_name"))
            samples[sample.name, labels] = sample.value
    return samples


async def run(service: Service, **fields: object) -> None:
    """One request to its end."""
    ended: list[object] = []
    message = Generate(id="a", prompt="abc", **fields)  # type: ignore[arg-type]
    ids = service.start([message], Caller(uid=1), ended.append)
    await until(lambda: bool(ended) and not service.is_live(ids[0]))


async def test_after_one_request_every_name_is_there(service: Service, host: ScriptedHost) -> None:
    host.stats = engine_stats(num_blocks_used=2, num_live_tokens=24, step_seconds={"forward": 0.5})
    await run(service, sampling=Sampling(max_tokens=3))
    assert {name for name, _ in scrape(service.metrics)} >= NAMES


async def test_the_figures_of_tiers_have_their_name_and_go_on_counting_with_the_next_engine(
    service: Service, host: ScriptedHost
) -> None:
    tiers = {"host": TierStats(num_blocks=3, hits_total=5), "disk": TierStats(hits_total=7, read_seconds_total=0.5)}
    host.stats = engine_stats(kv_tiers=tiers)
    samples = scrape(service.metrics)
    assert samples["pagedd:kv_tier_blocks", (("tier", "host"),)] == 3
    assert samples["pagedd:kv_tier_hits_total", (("tier", "disk"),)] == 7
    host.on_lost("ended")
    host.stats = engine_stats(kv_tiers={"host": TierStats(hits_total=1), "disk": TierStats(read_seconds_total=0.25)})
    samples = scrape(service.metrics)
    assert samples["pagedd:kv_tier_hits_total", (("tier", "host"),)] == 6
    assert samples["pagedd:kv_tier_hits_total", (("tier", "disk"),)] == 7
    assert samples["pagedd:kv_tier_read_seconds_total", (("tier", "disk"),)] == 0.75
    host.stats = engine_stats()
    assert not [name for name, _ in scrape(service.metrics) if "kv_tier" in name]


async def test_a_refusal_before_the_model_is_there_counts_for_the_one_that_was_configured(host: ScriptedHost) -> None:
    service = Service(DaemonConfig(model="org/name"), host)
    service.note_failure(PageddError("engine_loading", "loading"))
    assert 'pagedd:request_errors_total{code="engine_loading",model_name="org/name"} 1.0' in (
        service.metrics.render().decode()
    )
    await service.close()


async def test_every_sample_names_the_model(service: Service) -> None:
    await run(service)
    for family in text_string_to_metric_families(service.metrics.render().decode()):
        assert all(sample.labels["model_name"] == "bytes" for sample in family.samples)


async def test_a_request_is_counted_once_with_its_tokens_and_reason(service: Service) -> None:
    await run(service, sampling=Sampling(max_tokens=3))
    samples = scrape(service.metrics)
    assert samples["vllm:request_success_total", (("finished_reason", "length"),)] == 1
    assert samples["vllm:request_prompt_tokens_sum", ()] == 3
    assert samples["vllm:request_generation_tokens_sum", ()] == 3
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
    ):
        assert samples[f"vllm:{name}_count", ()] == 1
    assert samples["vllm:inter_token_latency_seconds_count", ()] == 2
    assert samples["vllm:iteration_tokens_total_count", ()] == 3


async def test_a_request_whose_client_goes_before_the_engine_has_it_is_no_finished_one(service: Service) -> None:
    [request_id] = service.start([Generate(id="a", prompt="abc")], Caller(uid=1), lambda message: None)
    service.client_gone(request_id)
    assert not [name for name, _ in scrape(service.metrics) if name.startswith("vllm:request_success")]


async def test_a_refusal_is_counted_by_its_code_and_is_no_success(service: Service) -> None:
    heard: list[object] = []
    service.start([Generate(id="a", prompt="")], Caller(uid=1), heard.append)
    assert isinstance(heard[0], Failed)
    samples = scrape(service.metrics)
    assert samples["pagedd:request_errors_total", (("code", "empty_prompt"),)] == 1
    assert not [name for name, _ in samples if name == "vllm:request_success_total"]


def test_blocks_by_state_add_up_and_slot_fill_is_apart() -> None:
    # A 17-token prompt at block size 16.
    stats = engine_stats(num_blocks_used=2, num_blocks_cached=1, num_blocks_free=253, num_live_tokens=17)
    samples = scrape(Metrics(EngineCollector(lambda: stats, engine_info, lambda: True)))
    blocks = [samples["pagedd:kv_blocks", (("state", state),)] for state in ("free", "cached", "used")]
    assert blocks == [253, 1, 2]
    assert samples["pagedd:kv_slot_fill_ratio", ()] == 17 / 32
    assert samples["pagedd:fragmentation_ratio", ()] == 15 / 32
    assert samples["vllm:kv_cache_usage_perc", ()] == 2 / 256
    assert samples["pagedd:device_fallback", ()] == 1


def test_what_is_not_available_is_absent_and_not_zero() -> None:
    idle = scrape(Metrics(EngineCollector(engine_stats, engine_info, lambda: False)))
    assert ("pagedd:kv_slot_fill_ratio", ()) not in idle
    assert ("pagedd:fragmentation_ratio", ()) not in idle
    without = scrape(Metrics(EngineCollector(lambda: None, lambda: None, lambda: False)))
    assert ("vllm:kv_cache_usage_perc", ()) not in without
    assert without["vllm:prompt_tokens_total", ()] == 0


def test_the_quality_of_a_quantized_cache_is_told_where_it_was_measured() -> None:
    quality = KVQuality(form="int8", agreement=0.96, divergence_nats=0.004, num_tokens=768)
    checked = engine_info(kv_cache_dtype="int8", kv_quality=quality)
    samples = scrape(Metrics(EngineCollector(engine_stats, lambda: checked, lambda: False)))
    assert samples["pagedd:kv_quality", (("measure", "agreement"),)] == 0.96
    assert samples["pagedd:kv_quality", (("measure", "divergence_nats"),)] == 0.004
    unchecked = scrape(Metrics(EngineCollector(engine_stats, engine_info, lambda: False)))
    assert not [name for name, _ in unchecked if name == "pagedd:kv_quality"]


async def test_counters_go_on_when_the_engine_starts_again(service: Service, host: ScriptedHost) -> None:
    host.stats = engine_stats(prompt_tokens_total=100, steps_total=5, step_seconds={"forward": 2.0})
    await run(service, sampling=Sampling(max_tokens=2))
    host.lose()
    assert scrape(service.metrics)["vllm:prompt_tokens_total", ()] == 100
    host.state, host.info = EngineState.READY, engine_info()
    host.stats = engine_stats(prompt_tokens_total=7, steps_total=1, step_seconds={"forward": 0.5})
    samples = scrape(service.metrics)
    assert samples["vllm:prompt_tokens_total", ()] == 107
    assert samples["pagedd:step_seconds_sum", (("part", "forward"),)] == 2.5
    assert samples["pagedd:step_seconds_count", (("part", "forward"),)] == 8
    assert samples["pagedd:engine_restarts_total", ()] == 1


async def test_no_counter_falls_when_the_engine_ends_after_steps_that_gave_no_token(
    service: Service, host: ScriptedHost
) -> None:
    host.stats = engine_stats(steps_total=5)
    host.on_outputs([])
    host.stats = engine_stats(steps_total=9)  # newer than the last report
    host.lose()
    assert scrape(service.metrics)["pagedd:steps_total", ()] == 9


async def test_a_step_in_the_middle_of_a_prefill_counts_and_an_abort_between_steps_does_not(
    service: Service, host: ScriptedHost
) -> None:
    host.stats = engine_stats(steps_total=1, num_scheduled_tokens=512)
    host.on_outputs([])
    host.on_outputs([])
    host.stats = engine_stats(steps_total=0, num_scheduled_tokens=0)  # another engine, which has not stepped yet
    host.on_outputs([])
    samples = scrape(service.metrics)
    assert samples["vllm:iteration_tokens_total_count", ()] == 1
    assert samples["vllm:iteration_tokens_total_sum", ()] == 512


def test_tokens_of_one_step_share_the_gap() -> None:
    metrics = Metrics(EngineCollector(lambda: None, lambda: None, lambda: False))
    times = RequestTimes(arrival_s=10.0, last_token_s={})
    metrics.produced(times, SequenceOutput(request_id="r", choice_index=0, token_ids=[1], queue_s=0.25), 11.0)
    metrics.produced(times, SequenceOutput(request_id="r", choice_index=0, token_ids=[2, 3, 4]), 11.75)
    metrics.finished(times, "stop", 5, 4, 12.0)
    samples = scrape(metrics)
    assert samples["vllm:time_to_first_token_seconds_sum", ()] == 1.0
    assert samples["vllm:inter_token_latency_seconds_count", ()] == 3
    assert samples["vllm:inter_token_latency_seconds_sum", ()] == pytest.approx(0.75)
    assert samples["vllm:request_queue_time_seconds_sum", ()] == 0.25
    assert samples["vllm:request_prefill_time_seconds_sum", ()] == 0.75
    assert samples["vllm:request_decode_time_seconds_sum", ()] == 1.0
    assert samples["vllm:e2e_request_latency_seconds_sum", ()] == 2.0
    assert metrics.recent_latencies() == {
        "first_token_seconds_p50": pytest.approx(1.0, rel=0.02),
        "first_token_seconds_p95": pytest.approx(1.0, rel=0.02),
        "inter_token_seconds_p50": pytest.approx(0.25, rel=0.02),
        "inter_token_seconds_p99": pytest.approx(0.25, rel=0.02),
    }
