"""The Grafana dashboard and the alerts: each figure in them is one that a real daemon tells, in the unit shown."""

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import yaml

from pagedd.client.errors import ERROR_KINDS
from pagedd.client.sync import Client

from .conftest import StartDaemon

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text())
RULES = yaml.safe_load((ROOT / "docs" / "alerts.yml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
GRAPHS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "timeseries"]
METRIC = re.compile(r"\b(?:vllm|pagedd):\w+")
ONLY_ON_A_GPU = re.compile(r"pagedd:gpu_\w+")

# The end of a figure's name, and the unit of a graph of it; of a rate of it, where that is another one.
UNITS = {
    "_ratio": ("percentunit", None),
    "_perc": ("percentunit", None),
    "_seconds": ("s", None),
    "_seconds_total": (None, "percentunit"),  # a share of the time
    "_bytes": ("bytes", None),
    "_bytes_total": (None, "Bps"),
    "_joules_total": (None, "watt"),
    "_watts": ("watt", None),
    "_joules_per_token": ("joule", None),
    "_celsius": ("celsius", None),
    "_tokens_total": (None, "suffix: tok/s"),
    "_cores": ("short", None),
}


def queries() -> Iterator[tuple[str, str]]:
    for graph in GRAPHS:
        yield from ((graph["title"], target["expr"]) for target in graph["targets"])


def test_the_file_is_what_the_list_of_panels_makes() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "dashboard.py"))["dashboard"]()
    assert made == DASHBOARD, "run: python -P scripts/dashboard.py > docs/grafana.json"


def test_every_figure_and_label_is_one_that_a_daemon_tells(start_daemon: StartDaemon) -> None:
    flags = ("--quota-tokens-per-minute", "400", "--kv-host-gib", "0.1", "--num-blocks", "64")
    costs = ("--cost-watts", "20", "--cost-kwh-price", "0.3")
    daemon = start_daemon(*flags, *costs, environ={"PAGEDD_KV_QUALITY_CHECK": "warn"}).wait_ready()
    with Client(daemon.endpoints.directory) as client:
        for max_tokens, status in ((8, 200), (390, 429), (100_000, 400)):
            body = json.dumps({"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True})
            assert daemon.request("POST", "/v1/completions", body)[0] == status
        # Some figures are there only while blocks are in use.
        answer = iter(client.generate("Once upon a time", max_tokens=380, ignore_eos=True))
        next(answer)
        told = daemon.get("/metrics")[1]

    labels_of = dict(re.findall(r"^([\w:]+)(?:\{(.*)\})? ", told, re.M))
    names = {name for _, query in queries() for name in METRIC.findall(query)}
    names |= {name for rule in ALERTS for name in METRIC.findall(rule["expr"])}
    assert len(names) > 30
    assert {name for name in names - labels_of.keys() if not ONLY_ON_A_GPU.fullmatch(name)} == set()
    telemetry = (ROOT / "daemon" / "telemetry.py").read_text()
    assert all(f'"{name.removeprefix("pagedd:")}"' in telemetry for name in names - labels_of.keys())

    for title, query in queries():
        for labels, name in re.findall(r"by \(([\w, ]+)\) \((?:rate\()?([\w:]+)", query):
            own = set(labels.split(", ")) - {"instance"}  # which is Prometheus's
            assert all(f'{label}="' in labels_of[name] for label in own), title


def test_units_are_those_of_the_figures() -> None:
    for graph in GRAPHS:
        unit = graph["fieldConfig"]["defaults"]["unit"]
        for query in (target["expr"] for target in graph["targets"]):
            names = METRIC.findall(query)
            if re.search(r"_seconds_(?:bucket|sum)$", names[0]):
                assert unit == "s", graph["title"]
            if " / " in query and not names[0].endswith("_sum"):
                assert unit == "percentunit", graph["title"]
                continue
            for end, (of_value, of_rate) in UNITS.items():
                if names[0].endswith(end) and not (end == "_tokens_total" and unit == "short"):
                    assert unit == (of_rate if "rate(" in query else of_value), (graph["title"], names[0])


def test_graphs_lie_side_by_side_in_the_grid_and_none_on_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells


def test_alerts_name_error_codes_that_exist() -> None:
    for rule in ALERTS:
        for pattern in re.findall(r'code=~"([^"]+)"', rule["expr"]):
            for code in pattern.split("|"):
                assert any(re.fullmatch(code, known) for known in ERROR_KINDS), code
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS) > 5
