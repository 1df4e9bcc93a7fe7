"""Prints `docs/grafana.json`, the Grafana dashboard, from the list of its panels.

    python -P scripts/dashboard.py > docs/grafana.json

Owns what is drawn and in which unit; a test holds the file to this list, and every figure to a real `/metrics` page.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

_WIDTH = 24  # of Grafana's grid
_HEIGHT = 7
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_METRIC = re.compile(r"\b((?:vllm|pagedd):\w+)(\{)?")
_ON_INSTANCE = 'instance=~"$instance"'


@dataclass(frozen=True)
class Panel:
    """One graph. `queries` are legend and PromQL, whose figures are all in `unit`, one of Grafana's."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    is_stacked: bool = False


def rate(counter: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({counter}[$__rate_interval]))"


def quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({histogram}_bucket[$__rate_interval])))"


def spread(title: str, unit: str, histogram: str, *shares: float) -> Panel:
    return Panel(title, unit, tuple((f"p{share * 100:g}", quantile(share, histogram)) for share in shares))


def mean(summary: str, by: str = "") -> str:
    return f"{rate(f'{summary}_sum', by)} / {rate(f'{summary}_count', by)}"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel(
            "Tokens a second",
            "suffix: tok/s",
            (("prompt", rate("vllm:prompt_tokens_total")), ("output", rate("vllm:generation_tokens_total"))),
        ),
        Panel(
            "Sequences",
            "short",
            (("with a seat", "sum (vllm:num_requests_running)"), ("waiting", "sum (vllm:num_requests_waiting)")),
        ),
        Panel(
            "Ended, by reason",
            "reqps",
            (("{{finished_reason}}", rate("vllm:request_success_total", "finished_reason")),),
        ),
        Panel("Refused or failed, by code", "reqps", (("{{code}}", rate("pagedd:request_errors_total", "code")),)),
        spread("Arrival to first token", "s", "vllm:time_to_first_token_seconds", 0.5, 0.95),
        spread("Between two tokens", "s", "vllm:inter_token_latency_seconds", 0.5, 0.99),
        Panel(
            "Waiting for a seat",
            "s",
            (
                ("p95", quantile(0.95, "vllm:request_queue_time_seconds")),
                ("first in the queue", "max (pagedd:oldest_wait_seconds)"),
            ),
        ),
        spread("Arrival to end", "s", "vllm:e2e_request_latency_seconds", 0.5, 0.95),
    ),
    "KV cache": (
        Panel("Blocks, by state", "short", (("{{state}}", "sum by (state) (pagedd:kv_blocks)"),), is_stacked=True),
        Panel(
            "Shares",
            "percentunit",
            (
                ("blocks in use", "avg (vllm:kv_cache_usage_perc)"),
                (
                    "prompt tokens from the cache",
                    f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}",
                ),
                ("slots of used blocks that are full", "avg (pagedd:kv_slot_fill_ratio)"),
            ),
        ),
        Panel(
            "Want of room, a second",
            "short",
            (
                ("cached blocks evicted", rate("pagedd:evictions_total")),
                ("sequences preempted", rate("vllm:num_preemptions_total")),
                ("tokens computed again", rate("pagedd:recomputed_tokens_total")),
            ),
        ),
        Panel("Tiers: bytes held", "bytes", (("{{tier}}", "sum by (tier) (pagedd:kv_tier_bytes)"),)),
        Panel(
            "Tiers: bytes copied",
            "Bps",
            (
                ("out of {{tier}}", rate("pagedd:kv_tier_read_bytes_total", "tier")),
                ("into {{tier}}", rate("pagedd:kv_tier_written_bytes_total", "tier")),
            ),
        ),
        Panel("Tiers: blocks found a second", "short", (("{{tier}}", rate("pagedd:kv_tier_hits_total", "tier")),)),
        Panel(
            "Tiers: share of time in copies",
            "percentunit",
            (
                ("out of {{tier}}", rate("pagedd:kv_tier_read_seconds_total", "tier")),
                ("into {{tier}}", rate("pagedd:kv_tier_write_seconds_total", "tier")),
            ),
        ),
        Panel(
            "Quantized cache: top tokens as with 16 bits, at load",
            "percentunit",
            (("{{instance}}", 'pagedd:kv_quality{measure="agreement"}'),),
        ),
    ),
    "Engine": (
        Panel(
            "Time of a step, by part",
            "s",
            (("{{part}}", mean("pagedd:step_seconds", "part")),),
            is_stacked=True,
        ),
        Panel(
            "How full a step is",
            "percentunit",
            (
                ("seats taken", "avg (pagedd:batch_occupancy_ratio)"),
                ("of the token budget", "avg (pagedd:token_budget_ratio)"),
            ),
        ),
        Panel("Steps a second", "short", (("{{instance}}", rate("pagedd:steps_total", "instance")),)),
        Panel("Tokens of a step", "short", (("mean", mean("vllm:iteration_tokens_total")),)),
        spread("Prompt tokens of a request", "short", "vllm:request_prompt_tokens", 0.5, 0.95),
        spread("Output tokens of a request", "short", "vllm:request_generation_tokens", 0.5, 0.95),
        Panel(
            "Since the start",
            "short",
            (
                ("engines that ended", "sum (pagedd:engine_restarts_total)"),
                ("integrity alarms", "sum (pagedd:integrity_alarms_total)"),
                ("CPU in place of the device", "max (pagedd:device_fallback)"),
            ),
        ),
        Panel("Advice (pagectl doctor)", "short", (("{{cause}}", "max by (cause) (pagedd:advice)"),)),
    ),
    "Machine": (
        Panel(
            "Cores in use by pagedd",
            "short",
            (("front", "sum (pagedd:front_cpu_cores)"), ("engine", "sum (pagedd:engine_cpu_cores)")),
            is_stacked=True,
        ),
        Panel(
            "Host memory",
            "bytes",
            (
                ("front", "sum (pagedd:front_rss_bytes)"),
                ("engine", "sum (pagedd:engine_rss_bytes)"),
                ("available", "sum (pagedd:host_memory_available_bytes)"),
            ),
        ),
        Panel("GPU in use", "percentunit", (("{{instance}}", "pagedd:gpu_utilization_ratio"),)),
        Panel(
            "GPU memory",
            "bytes",
            (("used", "sum (pagedd:gpu_memory_used_bytes)"), ("in all", "sum (pagedd:gpu_memory_total_bytes)")),
        ),
        Panel("GPU temperature", "celsius", (("{{instance}}", "pagedd:gpu_temperature_celsius"),)),
        Panel("Host's cores in use", "percentunit", (("{{instance}}", "pagedd:host_cpu_ratio"),)),
    ),
    "Energy and costs": (
        Panel(
            "Power",
            "watt",
            (
                ("the box, by {{source}}", rate("pagedd:energy_joules_total", "source")),
                ("the GPU", "sum (pagedd:gpu_power_watts)"),
            ),
        ),
        Panel("Power, by caller", "watt", (("{{caller}}", rate("pagedd:caller_energy_joules_total", "caller")),)),
        Panel(
            "Energy of a token",
            "joule",
            (("{{kind}}", 'avg by (kind) (pagedd:energy_joules_per_token{over="minute"})'),),
        ),
        Panel(
            "Money for a million tokens",
            "short",
            (("{{kind}}", 'avg by (kind) (pagedd:cost_per_million_tokens{over="minute"})'),),
        ),
    ),
    "Callers": (
        Panel("Tokens a second", "suffix: tok/s", (("{{caller}}", rate("pagedd:caller_tokens_total", "caller")),)),
        Panel("Choices in flight", "short", (("{{caller}}", "sum by (caller) (pagedd:caller_requests_in_flight)"),)),
        Panel(
            "Refused for a quota",
            "reqps",
            (("{{caller}}: {{limit}}", rate("pagedd:caller_refusals_total", "caller, limit")),),
        ),
        Panel(
            "Prompt tokens from the cache",
            "suffix: tok/s",
            (("{{caller}}", 'sum by (caller) (rate(pagedd:caller_tokens_total{kind="cached"}[$__rate_interval]))'),),
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """What Grafana imports; it asks for the data source."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": _place(0, top, _WIDTH, 1)})
        top += 1
        width = _WIDTH // (4 if len(row) % 4 == 0 else 3)
        for index, panel in enumerate(row):
            left = index * width % _WIDTH
            panels.append(_graph(panel, len(panels) + 1, _place(left, top, width, _HEIGHT)))
            if left + width == _WIDTH:
                top += _HEIGHT
    return {
        "uid": "pagedd",
        "title": "pagedd",
        "tags": ["pagedd", "llm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_variable("datasource", "datasource", "prometheus"), _instances()]},
        "panels": panels,
    }


def _graph(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 30 if panel.is_stacked else 5,
                    "showPoints": "never",
                    "stacking": {"mode": "normal" if panel.is_stacked else "none"},
                },
            },
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + index), "legendFormat": legend, "expr": _of_instance(query)}
            for index, (legend, query) in enumerate(panel.queries)
        ],
    }


def _of_instance(query: str) -> str:
    """The query about the daemons that are chosen above."""
    return _METRIC.sub(lambda found: f"{found[1]}{{{_ON_INSTANCE}{',' if found[2] else '}'}", query)


def _instances() -> dict[str, Any]:
    query = "label_values(vllm:num_requests_running, instance)"
    chosen = {"includeAll": True, "multi": True, "refresh": 2, "datasource": _DATASOURCE}
    return _variable("instance", "query", query) | chosen


def _variable(name: str, kind: str, query: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "query": query}


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1, ensure_ascii=False))
