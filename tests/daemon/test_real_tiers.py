"""Tiers of real daemons, with the real model: prefixes survive a restart, and nothing that is wrong is ever served."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pagedd.client.sync import Client

from .conftest import RunningDaemon, StartDaemon
from .test_real_statistics import metrics

# What follows is so clear that no rounding, of a prompt computed in other pieces, decides it.
PROMPT = " ".join(map(str, range(1, 101)))
LATE_PROMPT = " ".join(map(str, range(200, 150, -1)))


@pytest.fixture
def start(start_daemon: StartDaemon, tmp_path: Path):
    """`start(*flags, run=…)`: a daemon with a disk tier in `tmp_path`, not yet ready."""

    def start_one(*flags: str, run: str = "run") -> RunningDaemon:
        tier = ("--kv-disk-gib", "0.2", "--kv-disk-directory", str(tmp_path))
        return start_daemon("--num-blocks", "64", *tier, *flags, run=run)

    return start_one


def ask(daemon: RunningDaemon, prompt: str = PROMPT) -> tuple[str, int, int]:
    """The answer, how many blocks of 16 of the prompt could have been cached, and how many were."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    status, text = daemon.request("POST", "/v1/completions", json.dumps(body))
    assert status == 200, text
    answer: Any = json.loads(text)
    usage = answer["usage"]
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], (usage["prompt_tokens"] - 1) // 16, num_cached // 16


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


@pytest.mark.slow
def test_prefixes_survive_a_kill_and_a_restart_and_a_changed_byte_is_never_served(start, tmp_path: Path) -> None:
    """One story of four daemons, because each takes its seconds to start."""
    first = start().wait_ready()
    cold, num_full, num_cached = ask(first)
    assert num_full > 6
    assert num_cached == 0
    rests_after_it_has_written(first, num_full, tmp_path)
    first.stop(signal.SIGKILL)
    (path,) = files(tmp_path)
    (tmp_path / "0123456789abcdef.unfinished").write_bytes(b"half a file")

    second = start("--kv-host-gib", "0.1", run="second").wait_ready()
    assert not list(tmp_path.glob("*.unfinished"))
    assert ask(second) == (cold, num_full, num_full)
    scraped = metrics(second)
    assert scraped["pagedd:kv_tier_promotions_total/disk"] == num_full
    with Client(second.endpoints.directory) as client:
        figures = client.stats().figures
    assert figures["kv_tier_disk_promotions_total"] == num_full
    assert figures["kv_tier_disk_read_bytes_total"] == scraped["pagedd:kv_tier_read_bytes_total/disk"]
    assert figures["kv_tier_host_num_blocks"] == figures["kv_tier_host_stored_total"]
    ask(second, LATE_PROMPT)
    assert second.stop() == 0
    assert len(files(tmp_path)) == 2, "what is new is written when the daemon stops"

    block_bytes = int(figures["kv_tier_disk_read_bytes_total"]) // num_full
    num_blocks = int(figures["kv_tier_disk_num_blocks"])
    data = bytearray(path.read_bytes())
    data[(5 - num_blocks) * block_bytes] ^= 1  # the first byte of the sixth: a prefix is written from its head
    path.write_bytes(data)
    third = start(run="third").wait_ready()
    assert ask(third) == (cold, num_full, 5)
    assert third.log.count("the block is computed") == 1
    _, num_late, num_cached = ask(third, LATE_PROMPT)
    assert num_cached == num_late
    other_form = start("--kv-cache-dtype", "bf16", run="fourth").wait_ready()
    assert "another process uses" in other_form.log
    assert ask(other_form)[2] == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bf16", "fp8", "int8", "k8v4", "int4"])
def test_every_form_of_the_cache_answers_alike_from_each_tier_and_after_a_restart(start, tmp_path: Path, form) -> None:
    small = ("--kv-cache-dtype", form, "--num-blocks", "24", "--max-model-len", "384", "--max-num-seqs", "4")
    first = start(*small, "--kv-host-gib", "0.05").wait_ready()
    cold, num_full, num_cached = ask(first)
    assert num_full > 6
    assert num_cached == 0
    assert ask(first) == (cold, num_full, num_full)
    for start_number in (300, 400):  # more than the pool holds
        ask(first, " ".join(map(str, range(start_number, start_number + 60))))
    assert ask(first) == (cold, num_full, num_full)
    assert metrics(first)["pagedd:kv_tier_promotions_total/host"] > 0
    adds_up(first)
    assert first.stop() == 0

    second = start(*small, run="second").wait_ready()
    assert ask(second) == (cold, num_full, num_full)
    assert metrics(second)["pagedd:kv_tier_promotions_total/disk"] == num_full
    adds_up(second)


def adds_up(daemon: RunningDaemon) -> None:
    """At rest every block is free or cached."""
    scraped = metrics(daemon)
    free, cached, used = (scraped[f"pagedd:kv_blocks/{state}"] for state in ("free", "cached", "used"))
    assert (free + cached, used) == (24, 0)


def rests_after_it_has_written(daemon: RunningDaemon, num_blocks: int, folder: Path) -> None:
    """Fails unless an idle daemon writes `num_blocks`, once."""
    daemon.wait_until(lambda daemon: metrics(daemon)["pagedd:kv_tier_blocks/disk"] >= num_blocks)
    written = [path.stat().st_mtime_ns for path in files(folder)]
    time.sleep(1.0)
    assert [path.stat().st_mtime_ns for path in files(folder)] == written
