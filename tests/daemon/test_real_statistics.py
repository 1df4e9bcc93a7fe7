"""What the real daemon says of itself: the stats socket, `pagectl stats --json` and `/metrics` tell one story."""

import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, redirect_stdout, suppress

import msgspec
import pytest

from pagedd.client import pagectl
from pagedd.client.errors import PageddError
from pagedd.client.stats_frame import StatsFrame
from pagedd.client.sync import Client
from pagedd.tui.glyphs import UNICODE
from pagedd.tui.line import text_of
from pagedd.tui.pool import CACHED, FREE, NUM_AGES
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.batch import batch_lines
from pagedd.tui.renderables.cache import cache_bar, cache_figures
from pagedd.tui.renderables.header import Modes, header_line
from pagedd.tui.renderables.machine import machine_lines
from pagedd.tui.renderables.requests import columns_for
from pagedd.tui.renderables.throughput import throughput_lines
from pagedd.tui.state import State

from .conftest import RunningDaemon, StartDaemon
from .fake_engine import Prompt

Figures = dict[str, float | None]

# The name in a frame -> the name in `/metrics`; all that both tell.
COUNTERS = {
    "steps_total": "pagedd:steps_total",
    "preemptions_total": "vllm:num_preemptions_total",
    "prefix_queries_total": "vllm:prefix_cache_queries_total",
    "prefix_hits_total": "vllm:prefix_cache_hits_total",
    "recomputed_tokens_total": "pagedd:recomputed_tokens_total",
    "evictions_total": "pagedd:evictions_total",
    "prompt_tokens_total": "vllm:prompt_tokens_total",
    "generation_tokens_total": "vllm:generation_tokens_total",
    "integrity_alarms_total": "pagedd:integrity_alarms_total",
} | {
    f"step_seconds_{part}": f"pagedd:step_seconds_sum/{part}"
    for part in ("schedule", "prepare", "forward", "sample", "commit")
}
GAUGES = {
    "num_requests_running": "vllm:num_requests_running",
    "num_requests_waiting": "vllm:num_requests_waiting",
    "num_requests_awaiting_prefix": "pagedd:num_requests_awaiting_prefix",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "slot_fill": "pagedd:kv_slot_fill_ratio",
    "fragmentation": "pagedd:fragmentation_ratio",
    "contiguous_fragmentation": "pagedd:contiguous_fragmentation_ratio",
    "oldest_wait_s": "pagedd:oldest_wait_seconds",
    "token_budget": "pagedd:token_budget",
    "num_blocks_free": "pagedd:kv_blocks/free",
    "num_blocks_cached": "pagedd:kv_blocks/cached",
    "num_blocks_used": "pagedd:kv_blocks/used",
    "kv_agreement_ratio": "pagedd:kv_quality/agreement",
    "kv_divergence_nats": "pagedd:kv_quality/divergence_nats",
    "host_memory_total_bytes": "pagedd:host_memory_total_bytes",
}
SYSTEM = "You are a careful clerk. You count every block and every token, and you write down what you see. "


def metrics(daemon: RunningDaemon) -> dict[str, float]:
    """Every sample of `/metrics` by its name; of those with a state, part, tier or measure by NAME/STATE."""
    status, text = daemon.get("/metrics")
    assert status == 200
    samples = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"([\w:]+)(\{.*\})? (\S+)", line):
            label = re.search(r'(?:state|part|tier|measure)="(\w+)"', match[2] or "")
            samples[match[1] + (f"/{label[1]}" if label else "")] = float(match[3])
    return samples


def printed_stats(daemon: RunningDaemon) -> Figures:
    """The figures of `pagectl stats --json`."""
    command = [sys.executable, "-P", "-m", "pagedd.client.pagectl"]
    command += ["--runtime-dir", str(daemon.endpoints.directory), "stats", "--json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: Figures = json.loads(printed.stdout)["figures"]
    return figures


def published(client: Client) -> StatsFrame:
    """One frame of the stats socket."""
    with closing(client.watch_stats()) as frames:  # type: ignore[type-var]
        return next(frames)


@pytest.fixture
def client(serving_daemon: RunningDaemon) -> Iterator[Client]:
    with Client(serving_daemon.endpoints.directory, timeout_s=60) as client:
        yield client


@pytest.fixture
def load(client: Client) -> Iterator[Callable[..., None]]:
    """`load(n)` starts n generations that run until the test ends, if it ends before they have `max_tokens`."""
    running = []

    def generate(number: int, max_tokens: int) -> None:
        generation = client.generate(SYSTEM + f"{number}", max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        running.append(generation)
        generation.result()

    with ThreadPoolExecutor(8) as pool:

        def start(count: int, max_tokens: int = 400) -> None:
            for number in range(count):
                pool.submit(generate, number, max_tokens)

        yield start
        for generation in running:
            with suppress(PageddError):  # it has ended
                generation.cancel()


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s, "it never came to be so"


def test_at_rest_after_a_load_all_three_say_the_same_of_every_figure(
    serving_daemon: RunningDaemon, client: Client
) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in pool.map(lambda i: client.generate(SYSTEM * (1 + i % 3), max_tokens=20).result(), range(8)):
            assert done.usage.completion_tokens
    until(lambda: client.stats().figures["num_requests_running"] == 0)
    frame, printed, scraped = published(client), printed_stats(serving_daemon), metrics(serving_daemon)
    shared = COUNTERS | GAUGES
    from_frame = {name: frame.figures[name] for name in shared}
    assert {name: printed[name] for name in shared} == from_frame
    # A figure that is not available is no sample.
    assert {name: scraped.get(metric) for name, metric in shared.items()} == from_frame
    assert from_frame["generation_tokens_total"]
    assert from_frame["prefix_hits_total"]


def test_under_load_counters_never_run_backwards_from_one_to_the_other(
    serving_daemon: RunningDaemon, client: Client, load: Callable[..., None]
) -> None:
    load(4)
    until(lambda: client.stats().figures["num_requests_running"] == 4)
    told: list[Figures] = []
    for _ in range(3):
        told.append({name: metrics(serving_daemon)[metric] for name, metric in COUNTERS.items()})
        told.append(published(client).figures)
        told.append(printed_stats(serving_daemon))
    for name in COUNTERS:
        values = [figures[name] for figures in told]
        assert values == sorted(values), name  # type: ignore[type-var]
    generated = [figures["generation_tokens_total"] for figures in told]
    assert generated[0] != generated[-1], "the load stood still"
    for figures in told[1::3]:
        assert figures["num_requests_running"] == 4


def test_under_load_a_frame_agrees_with_itself(client: Client, load: Callable[..., None]) -> None:
    load(4, max_tokens=900)
    until(lambda: client.stats().figures["num_requests_running"] == 4)
    num_compared = 0
    for _ in range(3):
        frame = published(client)
        blocks, figures = frame.blocks, frame.figures
        assert blocks is not None
        assert [blocks.states.count(state) for state in range(3)] == [
            figures[f"num_blocks_{state}"] for state in ("free", "cached", "used")
        ]
        used = [block for block, state in enumerate(blocks.states) if state == 2]
        assert sum(blocks.fills[block] for block in used) == figures["num_live_tokens"]
        named = [block for row in frame.requests for block in row.block_table]
        assert {block: named.count(block) for block in used} == {block: blocks.ref_counts[block] for block in used}
        # A request that ended in the last step had tokens in it and has no row any more.
        num_in_rows = sum(row.num_scheduled_tokens for row in frame.requests)
        assert num_in_rows <= (figures["num_scheduled_tokens"] or 0)
        if len(frame.requests) == 4:
            assert num_in_rows == figures["num_scheduled_tokens"]
            num_compared += 1
        assert figures["inter_token_seconds_p50"] is not None
        assert frame.machine is not None
        assert frame.machine.memory_total_bytes == figures["host_memory_total_bytes"]
    assert num_compared, "the load ended too soon"


def one_instant(daemon: RunningDaemon) -> tuple[StatsFrame, dict[str, float]]:
    """What `pagectl stats --json` and `/metrics` say between the same two steps: it is scraped without a pause."""
    command = ["--runtime-dir", str(daemon.endpoints.directory), "stats", "--json"]
    scrapes: dict[float, dict[str, float]] = {}
    has_found = threading.Event()

    def scrape() -> None:
        while not has_found.is_set():
            scraped = metrics(daemon)
            scrapes[scraped["pagedd:steps_total"]] = scraped

    deadline_s = time.monotonic() + 60
    with ThreadPoolExecutor(2) as pool:
        scraping = [pool.submit(scrape) for _ in range(2)]
        try:
            while time.monotonic() < deadline_s:
                printed = io.StringIO()
                with redirect_stdout(printed):
                    assert pagectl.main(command) == 0
                frame = msgspec.json.decode(printed.getvalue(), type=StatsFrame)
                scraped = scrapes.get(frame.figures["steps_total"] or 0.0, {})
                if all(frame.figures[name] == scraped.get(metric) for name, metric in COUNTERS.items()):
                    return frame, scraped
        finally:
            has_found.set()
            for future in scraping:
                future.result()
    raise AssertionError("the engine never answered both between the same two steps")


def test_under_load_every_panel_of_pagetop_shows_what_pagectl_and_metrics_say_at_that_instant(
    serving_daemon: RunningDaemon, client: Client, load: Callable[..., None]
) -> None:
    load(4, max_tokens=900)
    until(lambda: client.stats().figures["num_requests_running"] == 4)
    before, scraped_before = one_instant(serving_daemon)
    frame, scraped = one_instant(serving_daemon)
    while frame.time_s - before.time_s < 1:  # over which rates are taken
        frame, scraped = one_instant(serving_daemon)
    figures = frame.figures
    assert figures["num_requests_running"] == 4
    steady = GAUGES.keys() - {"oldest_wait_s"}
    assert {name: figures[name] for name in steady} == {name: scraped.get(GAUGES[name]) for name in steady}

    state = State()
    state.take(before, 0.0)
    state.take(frame, 1.0)
    panels = {
        "header": [header_line(state, Modes(), 1.0, 200, UNICODE)],
        "machine": machine_lines(state, 60, 4, UNICODE),
        "throughput": throughput_lines(state, 60, 4, UNICODE),
        "batch": batch_lines(state, 60, UNICODE),
        "cache": [cache_bar(state, 100, UNICODE), *cache_figures(state, 120, UNICODE)],
    }
    shown = {name: "\n".join(map(text_of, lines)) for name, lines in panels.items()}

    def rate(metric: str) -> float:
        return (scraped[metric] - scraped_before[metric]) / (frame.time_s - before.time_s)

    def share(blocks: str) -> str:
        total = sum(scraped[f"pagedd:kv_blocks/{state}"] for state in ("free", "cached", "used"))
        return numbers.whole_percent(scraped[f"pagedd:kv_blocks/{blocks}"] / total)

    machine, blocks = frame.machine, frame.blocks
    assert machine is not None
    assert blocks is not None
    assert machine.cpu_percent is not None
    assert rate("vllm:generation_tokens_total") > 0
    hit_ratio = scraped["vllm:prefix_cache_hits_total"] / scraped["vllm:prefix_cache_queries_total"]
    expected = {
        "header": [frame.model, frame.device, f"block {blocks.block_size}", f"kv {frame.kv_cache_dtype}"],
        "machine": [
            f"/{scraped['pagedd:host_memory_total_bytes'] / (1 << 30):.1f} GiB",
            f"cores {machine.num_cores:4d}",
            numbers.whole_percent(machine.cpu_percent / 100),
        ],
        "throughput": [
            f"{numbers.count(rate('vllm:generation_tokens_total'), 7)} tok/s",
            f"{numbers.count(rate('vllm:prompt_tokens_total'), 7)} tok/s",
            f"first token p50 {numbers.milliseconds(figures['first_token_seconds_p50'])}",
            f"p95 {numbers.milliseconds(figures['first_token_seconds_p95'])}",
            f"gap         p50 {numbers.milliseconds(figures['inter_token_seconds_p50'])}",
            f"p99 {numbers.milliseconds(figures['inter_token_seconds_p99'])}",
        ],
        "batch": [
            f"{scraped['vllm:num_requests_running']:.0f}/{figures['max_num_seqs']:.0f}",
            f"{figures['num_scheduled_tokens']:.0f}/{figures['max_num_batched_tokens']:.0f}",
            f"waiting{numbers.count(scraped['vllm:num_requests_waiting'], 4)}",
            f"steps{numbers.count(rate('pagedd:steps_total'), 5)}/s",
        ],
        "cache": [
            *(f"{name} {share(name)}" for name in ("used", "cached", "free")),
            f"slot fill {numbers.percent(scraped['pagedd:kv_slot_fill_ratio'])}",
            f"fragmentation {numbers.percent(scraped['pagedd:fragmentation_ratio'])}",
            f"contiguous {numbers.percent(scraped['pagedd:contiguous_fragmentation_ratio'])}",
            f"prefix hits {numbers.percent(hit_ratio)}",
            f"evicted {numbers.count(rate('pagedd:evictions_total'), 5)}/s",
        ],
    }
    missing = [(name, words) for name, all_words in expected.items() for words in all_words if words not in shown[name]]
    assert not missing, shown

    looks = state.pool.looks
    assert looks.count(FREE) == scraped["pagedd:kv_blocks/free"]
    assert sum(looks.count(CACHED + age) for age in range(NUM_AGES)) == scraped["pagedd:kv_blocks/cached"]
    columns = {column.name: column for column in columns_for(160)}
    for sequence in state.sequences:
        row = sequence.row
        assert [columns[name].cell(sequence, UNICODE)[0].strip() for name in ("prompt", "cached", "out", "blocks")] == [
            numbers.count(value, 0)
            for value in (row.num_prompt_tokens, row.num_cached_tokens, row.num_output_tokens, len(row.block_table))
        ]
    running = [sequence for sequence in state.sequences if sequence.row.state in ("decode", "prefill")]
    assert len(running) == scraped["vllm:num_requests_running"]


def test_a_block_and_the_tree_say_what_the_frame_says(client: Client, load: Callable[..., None]) -> None:
    load(2)
    until(lambda: any(row.num_cached_tokens for row in client.stats().requests))
    row = next(row for row in client.stats(blocks=True).requests if row.block_table)
    detail = client.block(row.block_table[0])
    assert detail.text is not None
    assert SYSTEM.startswith(detail.text)
    assert detail.ref_count == len(detail.owners)
    assert client.text(row.request_id).prompt.startswith(SYSTEM)
    root = next(node for node in client.prefixes().nodes if node.text == detail.text)
    assert (root.digest, root.parent, root.state) == (detail.digest, "", "used")
    assert client.evict_prefix(root.digest).num_kept


def test_the_death_of_an_engine_and_its_successor_are_events(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(fake_engine=True).wait_ready()
    with Client(daemon.endpoints.directory) as client:
        with pytest.raises(PageddError, match="engine_died"):
            client.generate(prompt_token_ids=[int(Prompt.VANISH)]).result()
        daemon.wait_until(lambda daemon: daemon.get("/ready")[0] == 200 and "another" in daemon.log)
        events = client.stats().events
    kinds = [event.kind for event in events]
    assert kinds.count("engine") == 3
    assert {"model", "engine", "refusal"} == set(kinds)
    died = next(event for event in events if "another is started" in event.reason)
    assert "ended with status 9" in died.reason
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
