"""Quotas and costs of real daemons, as their users and `pagectl` meet them."""

import json
import re
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from pagedd.client.errors import PageddError
from pagedd.client.sync import Client

from .conftest import RunningDaemon, StartDaemon
from .fake_engine import Prompt

SLOW = [int(Prompt.SLOW)]


def pagectl(daemon: RunningDaemon, *arguments: str) -> str:
    command = [sys.executable, "-P", "-m", "pagedd.client.pagectl", "--runtime-dir", str(daemon.endpoints.directory)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout


def complete(daemon: RunningDaemon, **body: Any) -> tuple[int, Any]:
    status, answer = daemon.request("POST", "/v1/completions", json.dumps(body))
    return status, json.loads(answer)


def until_computed(client: Client, num_output_tokens: int) -> None:
    deadline_s = time.monotonic() + 30
    while client.usage().since_start.output_tokens < num_output_tokens:
        assert time.monotonic() < deadline_s


def test_a_caller_over_its_number_in_flight_is_refused_over_both_and_usage_tells(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--quota-max-requests", "1", fake_engine=True).wait_ready()
    with Client(daemon.endpoints.directory) as client:
        running = client.generate(prompt_token_ids=SLOW, max_tokens=2000)
        deltas = iter(running)  # an iterator that is dropped ends its request
        next(deltas)
        status, answer = complete(daemon, prompt=[1], max_tokens=2)
        assert (status, answer["error"]["code"]) == (429, "over_quota")
        with pytest.raises(
            PageddError, match="over_quota: 1 in flight and 1 came, limit 1; try again in 1 s"
        ) as refused:
            client.generate(prompt_token_ids=[1], max_tokens=2).result()
        assert (refused.value.code, refused.value.retry_after_s) == ("over_quota", 1.0)
        assert re.search(r"^root +1 +1/1 .* requests x2 ", pagectl(daemon, "usage"), re.MULTILINE)
        running.cancel()
        assert client.generate(prompt_token_ids=[1], max_tokens=2).result().usage.completion_tokens == 2
        report = json.loads(pagectl(daemon, "usage", "--json"))
    [root] = report["callers"]
    assert (root["num_requests"], root["num_in_flight"], root["refusals"]) == (2, 0, {"requests": 2})
    assert 'pagedd:caller_refusals_total{caller="root",limit="requests"} 2.0' in daemon.get("/metrics")[1]


def test_an_api_key_has_its_own_quota_and_usage_by_its_name(
    start_daemon: StartDaemon, free_port: int, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("laptop sk-1\ndesk sk-2\n")
    (tmp_path / "pagedd.toml").write_text(
        f'http_port = {free_port}\napi_key_file = "{tmp_path / "keys"}"\n[quota.key.laptop]\ntokens_per_minute = 10\n'
    )
    daemon = start_daemon("--config", str(tmp_path / "pagedd.toml"), fake_engine=True).wait_ready()

    def ask(key: str, max_tokens: int) -> tuple[int, str | None, str]:
        connection = HTTPConnection("127.0.0.1", free_port, timeout=30)
        headers = {"Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/completions", json.dumps({"prompt": [1], "max_tokens": max_tokens}), headers)
        response = connection.getresponse()
        said = response.read().decode()
        connection.close()
        return response.status, response.getheader("Retry-After"), said

    assert ask("sk-1", 9)[0] == 200
    status, retry_after, said = ask("sk-1", 5)
    assert (status, "over_quota" in said) == (429, True)
    assert 30 <= int(retry_after or 0) <= 36
    assert ask("sk-1", 50)[0] == 400
    assert ask("sk-2", 50)[0] == 200
    rows = pagectl(daemon, "usage").splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [["key", "laptop"], ["key", "desk"]]


def test_a_quota_of_a_key_that_is_not_there_ends_the_start(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("laptop sk-1\n")
    (tmp_path / "pagedd.toml").write_text(f'api_key_file = "{tmp_path / "keys"}"\n[quota.key.desk]\nweight = 2\n')
    daemon = start_daemon("--config", str(tmp_path / "pagedd.toml"), fake_engine=True)
    assert daemon.process.wait(60) == 78
    assert "quota.key.desk: api_key_file has no key of that name" in daemon.log


def test_with_a_stated_wattage_a_token_has_joules_and_a_price(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(
        "--num-blocks", "64", "--cost-watts", "100", "--cost-kwh-price", "0.3", "--cost-box-price", "2000"
    ).wait_ready()  # fmt: skip
    with Client(daemon.endpoints.directory) as client:
        for _ in range(2):
            client.generate(
                "The quick brown fox jumps over the lazy dog. " * 8, max_tokens=64, ignore_eos=True
            ).result()
        deadline_s = time.monotonic() + 30
        while not (report := client.usage()).since_start.joules:
            assert time.monotonic() < deadline_s
        frame = client.stats()
    cost = report.since_start
    assert report.energy_source in ("stated", "cpu", "gpu", "gpu+cpu")
    assert cost.cached_tokens > 0
    assert cost.joules is not None
    # Which of them is dearer is a question of time, and who else has the cores is one too.
    assert cost.joules_per_prompt_token is not None
    assert cost.joules_per_prompt_token > 0
    assert cost.joules_per_output_token is not None
    assert cost.joules_per_output_token > 0
    assert cost.money is not None
    assert cost.money > cost.joules / 3.6e6 * 0.3
    assert frame.figures["energy_joules_total"] is not None
    assert "energy: " in pagectl(daemon, "cost")
    text = daemon.get("/metrics")[1]
    for name in ("energy_joules_total", "energy_joules_per_token", "cost_per_million_tokens", "caller_tokens_total"):
        assert f"pagedd:{name}{{" in text


def test_what_is_neither_measured_nor_stated_has_no_number(serving_daemon: RunningDaemon) -> None:
    with Client(serving_daemon.endpoints.directory) as client:
        client.generate("Hello", max_tokens=2).result()
        until_computed(client, 1)
        report = client.usage()
        figures = client.stats().figures
    if report.energy_source:
        pytest.skip("this machine lets its energy be read")
    assert (report.since_start.joules, report.since_start.money, report.idle_joules) == (None, None, None)
    assert figures["energy_joules_total"] is None
    assert "energy: not known" in pagectl(serving_daemon, "cost")
